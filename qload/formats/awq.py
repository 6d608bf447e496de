"""AWQ, the GEMM layout: codes packed along N in an interleaved order, groups in order.

On disk, for a layer of K inputs and N outputs, group size g, b bits:

    qweight  int32             (K, N*b/32)    codes, packed along N, even columns of a word first
    qzeros   int32             (K/g, N*b/32)  zero points, stored unchanged, packed likewise
    scales   fp16, bf16, fp32  (K/g, N)

    w[n, k] = scales[k / g, n] * (code[k, n] - zero[k / g, n])

With `zero_point: false` all zero points are 2**(b-1) and may be omitted; stored zero points take
precedence. There is no group index: a cut of K inside a group is refused. Source: autoawq
0.2.9 and gptqmodel 7.7.0 for 4 bits, vLLM 0.11.0 for 8, bit-equal to all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AliasChoices, Field

from qload import configs, dtypes, spec
from qload.devices import StoredCodes
from qload.errors import UnsupportedFormatError
from qload.layouts import Stored, awq
from qload.lazy_torch import Tensor
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec
from qload.spec.integers import Integers, IntegerWeight, Origin, from_ordered_groups

BITS = (4, 8)
SCALES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)


@dataclass(frozen=True)
class AWQConfig(spec.Grouped, spec.Config):
    """Config of all AWQ layers of a checkpoint.

    Attributes
    ----------
    group_size
        Inputs that share a scale; -1: one group, whole on every rank.
    bits
        Bits of a code: 4 or 8.
    zero_point
        Whether qzeros are stored.
    claimed_bits
        Bits claimed by the config, if the shapes of the layer contradict them.
    """

    name: ClassVar[str] = "awq"

    group_size: int
    bits: int = 4
    zero_point: bool = True
    claimed_bits: int | None = field(default=None, compare=False)  # only a claim

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *BITS)
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> AWQConfig:
        """Read bits from shapes; the size of one group for all of K becomes -1, without cuts."""
        stored = self.zero_point or "qzeros" in headers.shapes
        config = self._with_stored_bits(headers)
        return replace(config.one_group(sum(headers.shapes["qweight"][:1])), zero_point=stored)

    def _with_stored_bits(self, headers: spec.LayerHeaders) -> AWQConfig:
        """Return the config with the bits of all shapes, if these agree on others than claimed."""
        codes, scales = (headers.shapes[name] for name in ("qweight", "scales"))
        zeros = headers.shapes.get("qzeros", (*scales[:1], *codes[1:]))
        if len(codes) != 2 or len(scales) != 2 or zeros != (scales[0], codes[1]) or not scales[1]:
            return self
        bits, rest = divmod(32 * codes[1], scales[1])
        if rest or bits == self.bits or bits not in BITS or self.groups(codes[0]) != scales[0]:
            return self
        return replace(self, bits=bits, claimed_bits=self.bits)

    def notes(self, headers: spec.LayerHeaders) -> tuple[str, ...]:
        """Note on claimed bits that the shapes contradict."""
        if self.claimed_bits is None:
            return ()
        return (f"bits is {self.claimed_bits}, the shapes are of {self.bits} bits and are believed",)


@dataclass(frozen=True, eq=False, repr=False)
class AWQWeight(IntegerWeight):
    """An AWQ GEMM layer, or a share of one.

    w[n, k] = scales[k / g, n] * (code[k, n] - zero[k / g, n]), groups of g inputs. Source: autoawq and
    gptqmodel, bit-equal to their files.

    Attributes
    ----------
    qweight
        Codes, packed along N, even columns of a word first: (K, N * bits / 32), int32.
    scales
        (K / g, N), fp16, bf16 or fp32.
    qzeros
        Zero points, unchanged, packed likewise: (K / g, N * bits / 32), int32; None: all are 2**(bits - 1).

    Examples
    --------
    >>> import torch
    >>> from qload import AWQConfig, AWQWeight
    >>> words = torch.tensor([[0x00000001]], dtype=torch.int32).repeat(32, 1)  # 8 codes: 1, then zeros
    >>> scales, zeros = torch.full((1, 8), 0.5).half(), torch.zeros(1, 1, dtype=torch.int32)
    >>> weight = AWQWeight(config=AWQConfig(group_size=32), qweight=words, scales=scales, qzeros=zeros)
    >>> weight.shape, weight.dequantize()[:, 0]
    ((8, 32), tensor([0.5000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000]))
    """

    config: AWQConfig
    qweight: Tensor
    scales: Tensor
    qzeros: Tensor | None = None

    format: ClassVar[str] = "awq"
    codes_field: ClassVar[str] = "qweight"
    example: ClassVar[AWQConfig] = AWQConfig(group_size=128)

    @classmethod
    def tensors(cls, config: AWQConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; scales and zero points follow K and bind its cuts."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        words, optional = f"N/{32 // config.bits}", not config.zero_point
        return (
            TensorSpec("qweight", (dtypes.int32,), f"K {words}", Role.WORD),
            TensorSpec("qzeros", (dtypes.int32,), f"{groups} {words}", Role.WORD, optional=optional),
            TensorSpec("scales", SCALES, f"{groups} N", Role.SCALE),
        )

    def stored(self) -> StoredCodes:
        """Describe the stored order for kernels."""
        packing, K = awq.columns(self.config.bits), self.qweight.shape[0]
        return StoredCodes(
            codes=packing.packed(self.qweight).T,
            scales=self.scales.T,
            zeros=self.qzeros,
            zero_rule=Stored().rule(packing.bits),
            run=max(K // max(self.scales.shape[0], 1), 1),
            zero_order=packing.codes,
        )

    def codes(self) -> spec.Codes:
        """Return codes, zero points and scales in plain order."""
        bits, K = self.config.bits, self.qweight.shape[0]
        packing = awq.columns(bits)
        codes = packing.packed(self.qweight)
        plain = spec.symmetric(bits, codes, self.scales, self.config.in_order(K, self.qweight.device))
        return plain if self.qzeros is None else replace(plain, zeros=Stored().read(self.qzeros, packing).T)

    def to_integers(self) -> Integers:
        """Convert to plain integers; exact for every zero point."""
        packing = awq.columns(self.config.bits)
        zeros = None if self.qzeros is None else packing.unpack(self.qzeros)
        return from_ordered_groups(self, lambda: packing.packed(self.qweight), self.scales, zeros)

    @classmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> Self:
        """Convert `integers` exactly, or raise RepackError.

        AWQ has 4 or 8 bits, groups of one size in order, and zero points of the same bits. `origin`: the AWQ
        weight to restore, possibly without stored zero points.
        """
        zero_point = origin is None or origin.stores_zeros
        integers.reject("awq", _find_repack_conflict(integers, zero_point))
        bits, groups, K = integers.bits, integers.groups, integers.layer.K
        packing = awq.columns(bits)
        return cls(
            config=AWQConfig(-1 if groups == 1 else K // groups, bits, zero_point),
            qweight=integers.pack_codes("qweight", packing, integers.unpack()),
            qzeros=Stored().write(integers.zeros.contiguous(), packing) if zero_point else None,
            scales=integers.scales.contiguous(),
            layer=integers.layer,
        )


def _find_repack_conflict(integers: Integers, zero_point: bool) -> str | None:
    bits, N, highest = integers.bits, integers.layer.N, integers.span[1]
    if bits not in BITS:
        return f"awq has {' or '.join(map(str, BITS))} bits, got {bits}"
    if N % (32 // bits):
        return f"N = {N} is not a multiple of {32 // bits}: short words"
    reason = integers.find_unordered_groups("awq")
    if reason:
        return reason
    if highest >= 2**bits:
        return f"a zero point of {highest} does not fit {bits} bits"
    if not zero_point and not integers.symmetric:
        return f"a zero point is not {2 ** (bits - 1)}, and zero_point=False stores none"
    return None


VARIANTS = ("awq (version gemm)",)
LAYOUTS = ("gemm",)


class _AWQ(configs.Section):
    bits: Annotated[int, configs.one_of(4, 8)] = Field(validation_alias=AliasChoices("bits", "w_bit"))
    group_size: int = Field(ge=-1, validation_alias=AliasChoices("group_size", "q_group_size"))
    zero_point: bool | None = None
    version: configs.Name = None
    checkpoint_format: configs.Name = None
    format: configs.Name = None
    pack_dtype: Literal["int32"] | None = None
    backend: str | None = None


def read_awq(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of `quant_method: awq`; only the GEMM layout is supported."""
    section = configs.validate(_AWQ, source)
    configs.agree(source, "bits", "w_bit")
    configs.agree(source, "group_size", "q_group_size")
    variants = [name.lower() for name in (section.version, section.checkpoint_format, section.format) if name]
    for variant in variants or ["gemm"]:
        if variant not in LAYOUTS:
            raise UnsupportedFormatError(
                f"awq_{variant}", f"the version of {source.file} is not supported", VARIANTS
            )
    if section.backend == "llm-awq":
        raise UnsupportedFormatError(
            "llm-awq", f"the backend of {source.file} packs in another order", VARIANTS
        )
    configs.check_group_size(source, section.group_size, "group_size", "q_group_size")
    sym = None if section.zero_point is None else not section.zero_point
    config = AWQConfig(section.group_size, section.bits, zero_point=sym is not True)
    fmt = ConfiguredFormat(AWQWeight, config)
    return section.claims(
        source, "awq", "gemm", fmt, bits=section.bits, group_size=section.group_size, sym=sym
    )


FORMATS = (AWQWeight,)
METHODS = (
    configs.Method(
        names=("awq", "awq_marlin"),
        read=read_awq,
        formats=(AWQWeight,),
        variants=VARIANTS,
        ignored={
            "dynamic": configs.IgnoredKey(
                "has settings for some modules; qload reads layers by their tensors"
            ),
        },
    ),
)
