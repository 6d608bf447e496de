"""GGUF: blocks of ggml, of 32 to 256 inputs of an output.

On disk, for a layer of K inputs and N outputs in one of ggml's types, such as Q4_K:

    q4_k         uint8    (N, K/256, 144)   blocks: codes and scales of 256 inputs
    scale        float32  () or (1,)        NVFP4 alone, optional: multiplies all weights

    w[n, k] = (value(code) - zero) * scale - offset       in float32, each product rounded

`GGUFStorage` names a tensor of blocks by its type. `qload.layouts.ggml` has the fields of each type and
`qload.storage.gguf_types` its block size. K may be cut between blocks, N anywhere. Source: ggml-quants.c of
llama-cpp-python 0.3.36 and gguf 0.19.0, bit-equal to both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from qload import configs, devices, dtypes, spec
from qload.errors import ArgumentError, RepackError
from qload.layouts import ggml
from qload.layouts.ggml_grids import ALL_DECODERS, sample_blocks, scale_bytes
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import Role, ScaleBytes, TensorSpec
from qload.spec.integers import Integers, Origin, from_codes, record_origin
from qload.storage import BLOCK_TYPES

GLOBAL_SCALE_TYPE = "NVFP4"
FLOAT_TYPES = ("MXFP4", "NVFP4")  # of e2m1 codes; their scales decide what kernels can represent
INTEGER_TYPES, INTEGER_GROUP = {4: "Q4_0", 8: "Q8_0"}, 32  # by bits
BITS = {
    "Q4_0": 4,
    "Q4_1": 4,
    "Q5_0": 5,
    "Q5_1": 5,
    "Q2_K": 2,
    "Q3_K": 3,
    "Q4_K": 4,
    "Q5_K": 5,
    "Q6_K": 6,
    "IQ4_NL": 4,
    "IQ4_XS": 4,
    "TQ1_0": 2,
    "TQ2_0": 2,
    "MXFP4": 4,
    "NVFP4": 4,
    "Q1_0": 1,
    "Q2_0": 2,
}  # fmt: skip  of a decoded code; 8 for all other types


@dataclass(frozen=True)
class GGUFConfig(spec.Config):
    """Config of a GGUF layer. ArgumentError for a type without a decoder.

    Attributes
    ----------
    type
        ggml's type, such as "Q4_K".
    """

    name: ClassVar[str] = "gguf"

    type: str

    @property
    def bits(self) -> int:
        """Bits of an element without its scales, by the name of the type."""
        return next(int(letter) for letter in self.type if letter.isdigit())

    def __post_init__(self) -> None:
        if self.type not in BLOCK_TYPES:
            raise ArgumentError("gguf: type", f"one of {', '.join(BLOCK_TYPES)}", repr(self.type))


@dataclass(frozen=True, eq=False, repr=False)
class GGUFWeight(spec.Weight):
    """A layer of a GGUF file in blocks of ggml, or a share of one.

    w[n, k] = (value(code) - zero) * scale - offset, in float32 and in the order of ggml. Source: ggml and
    gguf-py, bit-equal to both.

    Attributes
    ----------
    blocks
        Blocks as stored: (N, K / elements, bytes of a block), uint8.
    scale
        Scale of all weights, or one per fused part, fp32, for NVFP4; None: not stored.
    """

    config: GGUFConfig
    blocks: Tensor
    scale: Tensor | None = None

    format: ClassVar[str] = "gguf"
    example: ClassVar[GGUFConfig] = GGUFConfig("Q4_K")
    further: ClassVar[tuple[GGUFConfig, ...]] = tuple(
        GGUFConfig(name) for name in BLOCK_TYPES if name != "Q4_K"
    )

    @classmethod
    def tensors(cls, config: GGUFConfig) -> tuple[TensorSpec, ...]:
        """Declare the blocks of the type; cuts of K fall between blocks."""
        kind, scales = BLOCK_TYPES[config.type], scale_bytes(config.type)
        blocks = TensorSpec(
            "blocks",
            (dtypes.uint8,),
            f"N K/{kind.elements} {kind.nbytes}",
            Role.WORD,
            stored=kind.suffix,
            scale_bytes=ScaleBytes(*scales) if scales else None,
            decisive=config.type in FLOAT_TYPES,
        )
        if config.type != GLOBAL_SCALE_TYPE:
            return (blocks,)
        inputs = TensorSpec("input_scale", (dtypes.float32,), "P", Role.UNUSED, optional=True, spent=True)
        return blocks, TensorSpec("scale", (dtypes.float32,), "P", Role.SCALE, optional=True), inputs

    @classmethod
    def sample_facts(cls, config: GGUFConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Blocks of random codes and small scales, as random bytes have scales that are not finite."""
        kind = BLOCK_TYPES[config.type]
        return {"blocks": sample_blocks(config.type, sizes["N"], sizes["K"] // kind.elements, kind.nbytes)}

    def codes(self) -> spec.Codes:
        """Decode the blocks: codes, scales and offsets."""
        decoded = ALL_DECODERS[self.config.type](self.blocks)
        N, K = self.shape
        factors = None if self.scale is None else spec.expand_parts(self.scale, self.layer.parts)[:, None]
        scales, device = decoded.scales.reshape(N, -1), self.device
        return spec.Codes(
            bits=BITS.get(self.config.type, 8),
            codes=decoded.codes.reshape(N, K),
            scales=scales,
            zeros=torch.full_like(scales, decoded.zero, dtype=torch.int32) if decoded.zero else None,
            k_group=torch.arange(K, device=device) // (K // max(1, scales.shape[1])) if K else None,
            lookup=decoded.lookup,
            offsets=None if decoded.offsets is None else decoded.offsets.reshape(N, -1),
            row_factors=factors,
        )

    def to_integers(self) -> Integers:
        """Convert to plain integers; RepackError for other types than Q4_0 and Q8_0."""
        if self.config.type not in INTEGER_TYPES.values():
            reason = f"{self.config.type} is not one of {' and '.join(INTEGER_TYPES.values())}"
            raise RepackError(self.layer.name or self.format, "integers", reason)
        scales = ggml.copied(self.blocks[..., :2]).view(torch.float16)[..., 0].T.contiguous()
        integers = from_codes(self.codes(), scales, record_origin(self), INTEGER_GROUP)
        return replace(integers, known_symmetric=True, known_in_order=True)

    @classmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> GGUFWeight:
        """Convert `integers` exactly to Q4_0 or Q8_0, or raise RepackError; `origin`: not needed."""
        integers.reject(cls.format, _why_not_blocks(integers))
        kind, K = INTEGER_TYPES[integers.bits], integers.layer.K
        size = K if integers.groups == 1 else integers.group_size
        scales = integers.scales.half().repeat_interleave(size // INTEGER_GROUP, 0)[: K // INTEGER_GROUP]
        codes = devices.plain(integers.unpack()).T.to(torch.uint8)
        blocks = ggml.encode(kind, codes, scales.T.contiguous().view(torch.uint8), INTEGER_GROUP)
        return cls(config=GGUFConfig(kind), blocks=blocks, layer=integers.layer)


def _why_not_blocks(integers: Integers) -> str | None:
    """Return why blocks of Q4_0 and Q8_0 cannot represent integers, or None."""
    K, size, scales = integers.layer.K, integers.group_size, integers.scales
    if integers.bits not in INTEGER_TYPES:
        return f"its integers have 4 or 8 bits, got {integers.bits}"
    if not integers.symmetric:
        return f"its integers have no zero points but {2 ** (integers.bits - 1)}"
    if K % INTEGER_GROUP or (integers.groups > 1 and size % INTEGER_GROUP):
        return f"a block has {INTEGER_GROUP} inputs, got groups of {size} of {K} inputs"
    inexact = (scales.half().float() != scales.float()).nonzero()
    if inexact.numel():
        group, n = inexact[0].tolist()
        return f"the scale of output {n} and group {group}, {float(scales[group, n]):.9g}, is not a float16"
    return integers.find_unordered_groups("gguf")


def read_gguf(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of a GGUF file: its layers are in any of ggml's types."""
    formats = tuple(ConfiguredFormat(GGUFWeight, GGUFConfig(name)) for name in BLOCK_TYPES)
    return configs.Claims("gguf", "gguf", file=source.file, section=source.section, formats=formats)


FORMATS = (GGUFWeight,)
METHODS = (configs.Method(names=("gguf",), read=read_gguf, formats=FORMATS, exclusion_key=""),)  # of a header
