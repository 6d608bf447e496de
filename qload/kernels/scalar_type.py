"""Scalar types with the names and ids of inference engines.

A stored integer code means `code - bias`: `uint4b8` holds -8 to 7. The id packs, lowest bits first:
exponent 8, mantissa 8, signed 1, bias 32, finite only 1, NaN representation 8. Source: the ids that vLLM,
SGLang and pymllm share.
"""

from dataclasses import dataclass
from enum import IntEnum


class NanRepr(IntEnum):
    """Encoding of NaN in a float."""

    NONE = 0
    IEEE_754 = 1
    EXTD_RANGE_MAX_MIN = 2  # only the code of all ones, so that the range reaches further


@dataclass(frozen=True)
class ScalarType:
    """A type of codes: an integer, or a small float.

    Attributes
    ----------
    exponent, mantissa
        Bits of each; an integer has an `exponent` of 0, and its bits but for the sign are its `mantissa`.
    signed
        Whether there is a sign bit.
    bias
        A stored code means `code - bias`.
    finite_values_only
        Whether a float has no infinities.
    nan_repr
        How a float says NaN.
    """

    exponent: int
    mantissa: int
    signed: bool
    bias: int = 0
    finite_values_only: bool = False
    nan_repr: NanRepr = NanRepr.IEEE_754

    @property
    def size_bits(self) -> int:
        """Bits of a stored value."""
        return self.exponent + self.mantissa + self.signed

    @property
    def id(self) -> int:
        """Number of this type in a kernel's call."""
        value = shift = 0
        for width, field in (
            (8, self.exponent),
            (8, self.mantissa),
            (1, int(self.signed)),
            (32, self.bias),
            (1, int(self.finite_values_only)),
            (8, int(self.nan_repr)),
        ):
            value |= (field & ((1 << width) - 1)) << shift
            shift += width
        return value

    def is_signed(self) -> bool:
        """True with a sign bit."""
        return self.signed

    def has_bias(self) -> bool:
        """True if the value of a code is the code less a constant."""
        return self.bias != 0

    def is_integer(self) -> bool:
        """True for integers."""
        return self.exponent == 0

    def is_floating_point(self) -> bool:
        """True for small floats."""
        return self.exponent != 0

    def is_ieee_754(self) -> bool:
        """True for infinities and NaN as in IEEE 754."""
        return self.is_floating_point() and not self.finite_values_only and self.has_nans()

    def has_nans(self) -> bool:
        """True for a float with NaN."""
        return self.is_floating_point() and self.nan_repr is not NanRepr.NONE

    def has_infs(self) -> bool:
        """True for a float with infinities."""
        return self.is_floating_point() and not self.finite_values_only

    def max(self) -> int | float:
        """The highest value."""
        if self.is_integer():
            return (1 << self.mantissa) - 1 - self.bias
        exponent, mantissa = (1 << self.exponent) - 1, (1 << self.mantissa) - 1
        if self.has_infs():
            exponent -= 1
        elif self.nan_repr is NanRepr.EXTD_RANGE_MAX_MIN:
            exponent, mantissa = (exponent, mantissa - 1) if self.mantissa else (exponent - 1, 0)
        return 2.0 ** (exponent - self._exponent_bias) * (1 + mantissa / (1 << self.mantissa))

    def min(self) -> int | float:
        """The lowest value; of a float without sign or mantissa, the lowest power of two."""
        if self.is_integer():
            return (-(1 << self.mantissa) if self.signed else 0) - self.bias
        if self.signed:
            return -self.max()
        return 0.0 if self.mantissa else 2.0**-self._exponent_bias

    @property
    def _exponent_bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    def __str__(self) -> str:
        if self.is_floating_point():
            flags = "f" * self.finite_values_only + "n" * (self.nan_repr is NanRepr.EXTD_RANGE_MAX_MIN)
            unsigned = "u" * (not self.signed)
            return f"float{self.size_bits}_e{self.exponent}m{self.mantissa}{flags}{unsigned}"
        bias = f"b{self.bias}" if self.bias else ""
        return f"{'' if self.signed else 'u'}int{self.size_bits}{bias}"


def _uint(bits: int, bias: int = 0) -> ScalarType:
    return ScalarType(0, bits, signed=False, bias=bias)


_MAX_MIN = NanRepr.EXTD_RANGE_MAX_MIN


class scalar_types:  # as the engines spell it
    """Every type by its name, as the engines spell it."""

    int4: ScalarType = ScalarType(0, 3, signed=True)
    int8: ScalarType = ScalarType(0, 7, signed=True)
    uint2, uint3, uint4, uint5, uint6, uint7, uint8 = (_uint(bits) for bits in range(2, 9))
    uint2b2: ScalarType = _uint(2, 2)
    uint3b4: ScalarType = _uint(3, 4)
    uint4b8: ScalarType = _uint(4, 8)
    uint5b16: ScalarType = _uint(5, 16)
    uint6b32: ScalarType = _uint(6, 32)
    uint7b64: ScalarType = _uint(7, 64)
    uint8b128: ScalarType = _uint(8, 128)
    float4_e2m1f: ScalarType = ScalarType(2, 1, signed=True, finite_values_only=True, nan_repr=NanRepr.NONE)
    float6_e3m2f: ScalarType = ScalarType(3, 2, signed=True, finite_values_only=True, nan_repr=NanRepr.NONE)
    float6_e2m3f: ScalarType = ScalarType(2, 3, signed=True, finite_values_only=True, nan_repr=NanRepr.NONE)
    float8_e4m3fn: ScalarType = ScalarType(4, 3, signed=True, finite_values_only=True, nan_repr=_MAX_MIN)
    float8_e5m2: ScalarType = ScalarType(5, 2, signed=True)
    float8_e8m0fnu: ScalarType = ScalarType(8, 0, signed=False, finite_values_only=True, nan_repr=_MAX_MIN)
    float16_e5m10 = float16 = half = ScalarType(5, 10, signed=True)
    float16_e8m7 = bfloat16 = ScalarType(8, 7, signed=True)


def integer_type(bits: int, *, zero_points: bool) -> ScalarType:
    """`uint4` for codes with zero points, `uint4b8` for codes with the zero point 2**(bits - 1)."""
    return _uint(bits) if zero_points else _uint(bits, 1 << (bits - 1))
