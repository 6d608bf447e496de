"""Quark's own codes: int4 and uint4 in words along N, and MXFP6.

On disk, for a layer of K inputs and N outputs, group size g:

    weight             int32             (K, N/8)    codes, packed along N
    weight_scale       bf16, fp16, fp32  (K/g, N)
    weight_zero_point  int32             (K/g, N/8)  packed likewise; optional in symmetric types

    w[n, k] = weight_scale[k / g, n] * (code[k, n] - zero[k / g, n])

Codes and zero points are unsigned (uint4) or two's complement (int4). Even columns of a word come first, as
in AWQ, if the config's pack_method is `reorder`.

MXFP6 has floats of 6 bits (e2m3 or e3m2) and a power of two for 32 inputs:

    weight        uint8             (N, K*3/4)  four codes in three bytes, the first in the low bits
    weight_scale  e8m0, uint8       (N, K/32)

    w[n, k] = float(code[n, k]) * 2**(weight_scale[n, k / 32] - 127)

Quark's other types are formats of other programs: `detect.methods.quark`. Source: amd-quark 0.13, bit-equal
to it after one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from qload import dtypes, spec
from qload.errors import UnsupportedFormatError
from qload.layouts import Packing, Stored, awq, fp4
from qload.layouts.compressed_tensors import rows
from qload.layouts.gptq import columns
from qload.lazy_torch import Tensor, torch
from qload.spec import Role, TensorSpec
from qload.spec.integers import Integers, IntegerWeight, Origin, from_ordered_groups

BITS = 4
CODES_PER_WORD = 8
REMEDY = "amd-quark loads it, and its dequantize() gives plain weights"
SCALES = (dtypes.bfloat16, dtypes.float16, dtypes.float32)
NO_ZERO_POINTS = "remedy   state symmetric true if the type has no zero points"
SIGNS = -0x77777778  # the highest bit of each of eight codes: 0x88888888 as an int32


@dataclass(frozen=True)
class QuarkInt4Config(spec.Grouped, spec.Config):
    """Config of int4 and uint4.

    Attributes
    ----------
    group_size
        Inputs that share a scale; -1: one group.
    signed
        Whether codes and zero points are two's complement (int4).
    reorder
        Whether even columns of a word come first.
    zero_points
        Whether zero points are required; False: optional, the middle of the codes without them.
    """

    name: ClassVar[str] = "quark_int4"
    bits: ClassVar[int] = BITS

    group_size: int
    signed: bool = False
    reorder: bool = True
    zero_points: bool = field(default=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> QuarkInt4Config:
        """Turn one group that covers all of K into -1; UnsupportedFormatError for a padded last word."""
        words, N = headers.shapes["weight"][1:], (headers.shapes["weight_scale"] or (0,))[-1]
        if N % CODES_PER_WORD and words == (-(-N // CODES_PER_WORD),):
            name = headers.names.full("weight")
            reason = f"{name} has {N} outputs, no multiple of {CODES_PER_WORD}, and pads its last word"
            raise UnsupportedFormatError(f"quark_int4 of {N} outputs", reason, remedy=REMEDY)
        return self.one_group(headers.sizes(QuarkInt4Weight.tensors(self)[:1])["K"])

    @property
    def packing(self) -> Packing:
        """Order of codes in words."""
        return awq.columns(BITS) if self.reorder else columns(BITS)


@dataclass(frozen=True, eq=False, repr=False)
class QuarkInt4Weight(IntegerWeight):
    """A layer of Quark's int4 or uint4, or a share of one.

    w[n, k] = weight_scale[k / g, n] * (code[k, n] - zero[k / g, n]), groups of g inputs. Source: amd-quark,
    bit-equal to its files after one rounding.

    Attributes
    ----------
    weight
        Codes, packed along N: (K, N / 8), int32.
    weight_scale
        (K / g, N), bf16, fp16 or fp32.
    weight_zero_point
        Packed likewise: (K / g, N / 8), int32; None: the middle of the codes.
    """

    config: QuarkInt4Config
    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None = None

    format: ClassVar[str] = "quark_int4"
    codes_field: ClassVar[str] = "weight"
    example: ClassVar[QuarkInt4Config] = QuarkInt4Config(group_size=128)

    @classmethod
    def tensors(cls, config: QuarkInt4Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; words bind cuts of N, groups bind cuts of K."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        words = (dtypes.int32,)
        return (
            TensorSpec("weight", words, "K N/8", Role.WORD),
            TensorSpec("weight_scale", SCALES, f"{groups} N", Role.SCALE),
            TensorSpec(
                "weight_zero_point",
                words,
                f"{groups} N/8",
                Role.WORD,
                optional=not config.zero_points,
                reason=NO_ZERO_POINTS,
            ),
        )

    def _unsigned(self, words: Tensor) -> Tensor:
        return words ^ SIGNS if self.config.signed else words

    def codes(self) -> spec.Codes:
        """Return codes and zero points, counted from 0, in plain order."""
        packing, K = self.config.packing, self.layer.K
        codes = packing.packed(self._unsigned(self.weight))
        groups = self.config.in_order(K, self.device)
        plain = spec.symmetric(BITS, codes, self.weight_scale, groups)
        if self.weight_zero_point is None:
            return plain
        return replace(plain, zeros=Stored().read(self._unsigned(self.weight_zero_point), packing).T)

    def to_integers(self) -> Integers:
        """Convert to plain integers; exact for every zero point."""
        packing, stored = self.config.packing, self.weight_zero_point
        zeros = None if stored is None else packing.unpack(self._unsigned(stored))
        codes = packing.packed(self._unsigned(self.weight))
        return from_ordered_groups(self, lambda: codes, self.weight_scale, zeros)

    @classmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> Self:
        """Convert `integers` exactly, or raise RepackError; `origin`: the weight to restore."""
        groups, (lowest, highest) = integers.groups, integers.span
        reason = integers.find_unordered_groups("quark_int4")
        if integers.bits != BITS:
            reason = f"quark_int4 has 4 bits, got {integers.bits}"
        elif integers.layer.N % CODES_PER_WORD:
            reason = f"N = {integers.layer.N} is not a multiple of {CODES_PER_WORD}: short words"
        elif lowest < 0 or highest >= 2**BITS:
            reason = f"a zero point of {lowest if lowest < 0 else highest} does not fit 4 bits"
        integers.reject("quark_int4", reason)
        size = -1 if groups == 1 else integers.layer.K // groups
        config: QuarkInt4Config = origin.config if origin else QuarkInt4Config(size)
        words = config.packing.pack(integers.unpack())
        zeros = Stored().write(integers.zeros.contiguous(), config.packing)
        signs = SIGNS if config.signed else 0
        return cls(
            config=config,
            weight=words ^ signs,
            weight_scale=integers.scales.contiguous(),
            weight_zero_point=zeros ^ signs if origin is None or origin.stores_zeros else None,
            layer=integers.layer,
        )


@dataclass(frozen=True)
class QuarkMXFP6Config(spec.Config):
    """Config of MXFP6; `element`: e2m3 or e3m2."""

    name: ClassVar[str] = "quark_mxfp6"

    element: Literal["e2m3", "e3m2"] = "e2m3"


GROUP = 32


@dataclass(frozen=True, eq=False, repr=False)
class QuarkMXFP6Weight(spec.Weight):
    """An MXFP6 layer of Quark, or a share of one.

    w[n, k] = float(code[n, k]) * 2**(weight_scale[n, k / 32] - 127). Source: amd-quark, bit-equal to its
    files.

    Attributes
    ----------
    weight
        Four codes in three bytes, the first in the low bits: (N, K * 3 / 4), uint8.
    weight_scale
        Exponents (e8m0), 255 for NaN: (N, K / 32), uint8 or float8_e8m0fnu.
    """

    config: QuarkMXFP6Config
    weight: Tensor
    weight_scale: Tensor

    format: ClassVar[str] = "quark_mxfp6"
    example: ClassVar[QuarkMXFP6Config] = QuarkMXFP6Config()

    @classmethod
    def tensors(cls, config: QuarkMXFP6Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; cuts of K fall between groups of 32 inputs."""
        exponents = (dtypes.uint8, dtypes.float8_e8m0fnu)
        return (
            TensorSpec("weight", (dtypes.uint8,), "N K*3/4", Role.WORD),
            TensorSpec("weight_scale", exponents, f"N K/{GROUP}", Role.SCALE),
        )

    def codes(self) -> spec.Codes:
        """Return the codes, their values, and the powers of two."""
        return spec.Codes(
            bits=6,
            codes=rows(6, dense=True).packed(self.weight.contiguous().view(torch.int32)),
            scales=fp4.e8m0(self.weight_scale.view(torch.uint8)),
            zeros=None,
            k_group=torch.arange(self.layer.K, device=self.device) // GROUP,
            lookup=values_of_six_bits(self.config.element, self.device),
        )


def values_of_six_bits(element: str, device: torch.device) -> Tensor:
    """Table of the values of e2m3 or e3m2, float32 (64,)."""
    mantissa = 3 if element == "e2m3" else 2
    codes = torch.arange(64, device=device)
    exponent, fraction = (codes & 31) >> mantissa, codes & 2**mantissa - 1
    bias = 1 if element == "e2m3" else 3
    significand = (fraction + (exponent > 0) * 2**mantissa).float()
    values = torch.ldexp(significand, exponent.clamp(min=1) - bias - mantissa)
    return torch.where(codes >= 32, -values, values)


FORMATS = (QuarkInt4Weight, QuarkMXFP6Weight)
METHODS = ()  # read by detect.methods
