"""AQLM: a sum of vectors from several codebooks, with a scale for each group of outputs.

On disk, for a layer of K inputs and N outputs, C codebooks of 2**b vectors of og outputs and ig inputs:

    codes      int8, int16, int32  (N/og, K/ig, C)   modulo 2**b
    codebooks  fp16, bf16, fp32    (C, 2**b, og, ig)
    scales     as the codebooks    (N/og, 1, 1, 1)

    w[n, k] = scales[n / og] * sum over c of codebooks[c, codes[n / og, k / ig, c], n % og, k % ig]

in float32, codebooks in their order. Source: aqlm 1.1.7, bit-equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from qload import configs, dtypes, spec
from qload.errors import ArgumentError
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.loader.exclusion import Exclusions
from qload.spec import Role, TensorSpec

FLOATS = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
MAX_BITS, MAX_CODEBOOKS, MAX_GROUP = 16, 64, 1024
WEIGHT = ".weight"


@dataclass(frozen=True)
class AQLMConfig(spec.Config):
    """Config of AQLM; ArgumentError for sizes out of range.

    Attributes
    ----------
    codebooks, bits
        Number of codebooks, and bits of a code: a codebook has 2**bits vectors.
    in_group, out_group
        Inputs and outputs of a vector.
    """

    name: ClassVar[str] = "aqlm"

    codebooks: int
    bits: int
    in_group: int = 8
    out_group: int = 1

    def __post_init__(self) -> None:
        limits = (("codebooks", MAX_CODEBOOKS), ("bits", MAX_BITS), ("in_group", MAX_GROUP))
        for name, limit in (*limits, ("out_group", MAX_GROUP)):
            if not 1 <= getattr(self, name) <= limit:
                raise ArgumentError(f"aqlm: {name}", f"1 to {limit}", str(getattr(self, name)))


@dataclass(frozen=True, eq=False, repr=False)
class AQLMWeight(spec.Weight):
    """A layer of AQLM, or a share of one.

    w[n, k] = scales[n / og] * sum over c of codebooks[c, codes[n / og, k / ig, c], n % og, k % ig]. Source:
    aqlm, bit-equal to it.

    Attributes
    ----------
    indices
        Codes modulo 2**bits: (N / og, K / ig, C), int8 up to 8 bits, else int16; stored as `codes`.
    codebooks
        (C, 2**bits, og, ig), fp16, bf16 or fp32.
    scales
        (N / og, 1, 1, 1), fp16, bf16 or fp32.
    """

    config: AQLMConfig
    indices: Tensor
    codebooks: Tensor
    scales: Tensor

    format: ClassVar[str] = "aqlm"
    example: ClassVar[AQLMConfig] = AQLMConfig(codebooks=2, bits=8)

    @classmethod
    def tensors(cls, config: AQLMConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; vectors bind cuts, and layers with the same codebooks are fused."""
        count, size, og, ig = config.codebooks, 2**config.bits, config.out_group, config.in_group
        word = dtypes.int8 if config.bits <= 8 else dtypes.int16
        between = (-size // 2, size // 2 - 1)
        rows = f"N/{og}" if og > 1 else "N"
        columns = f"K/{ig}" if ig > 1 else "K"
        return (
            TensorSpec("indices", (word,), f"{rows} {columns} {count}", Role.WORD, "codes", between=between),
            TensorSpec("codebooks", FLOATS, f"{count} {size} {og} {ig}", Role.SCALE, fact=True, signed=True),
            TensorSpec("scales", FLOATS, f"{rows} 1 1 1", Role.SCALE, signed=True),
        )

    def codes(self) -> spec.Codes:
        """Return the sums of vectors, which are floats, and a scale for each output."""
        config, (N, K) = self.config, self.shape
        codes = self.indices.long() & 2**config.bits - 1
        sums = self.codebooks[0].float()[codes[..., 0]]
        for number in range(1, config.codebooks):
            sums += self.codebooks[number].float()[codes[..., number]]
        return spec.Codes(
            bits=config.bits,
            codes=sums.swapaxes(1, 2).reshape(N, K),
            scales=self.scales.float().reshape(-1).repeat_interleave(config.out_group)[:, None],
            zeros=None,
            k_group=None,
        )

    @classmethod
    def sample_facts(cls, config: AQLMConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Codebooks of whole numbers, equal for all layers."""
        shape = config.codebooks, 2**config.bits, config.out_group, config.in_group
        return {"codebooks": (torch.arange(torch.Size(shape).numel()) % 17 - 8).reshape(shape).half()}


class _AQLM(configs.Section):
    in_group_size: Annotated[int, Field(ge=1, le=MAX_GROUP)] = 8
    out_group_size: Annotated[int, Field(ge=1, le=MAX_GROUP)] = 1
    num_codebooks: Annotated[int, Field(ge=1, le=MAX_CODEBOOKS)] = 1
    nbits_per_codebook: Annotated[int, Field(ge=1, le=MAX_BITS)] = 16
    linear_weights_not_to_quantize: configs.NameList | None = None

    lists = ("linear_weights_not_to_quantize", "modules_to_not_convert")


def read_aqlm(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of `quant_method: aqlm`; entries of its list are names of weights."""
    section = configs.validate(_AQLM, source)
    config = AQLMConfig(
        section.num_codebooks, section.nbits_per_codebook, section.in_group_size, section.out_group_size
    )
    exclusions = section.exclusions()
    names = tuple(name.removesuffix(WEIGHT) for name in exclusions.names)
    return section.claims(
        source,
        "aqlm",
        "aqlm",
        ConfiguredFormat(AQLMWeight, config),
        bits=config.bits,
        exclusions=Exclusions(names, exclusions.key),
    )


FORMATS = (AQLMWeight,)
METHODS = (
    configs.Method(
        names=("aqlm",),
        read=read_aqlm,
        formats=FORMATS,
        variants=("aqlm",),
        exclusion_key="linear_weights_not_to_quantize",
    ),
)
