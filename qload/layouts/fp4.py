"""Four-bit codes, two per byte with the first in the low bits, and power-of-two scales (e8m0).

e2m1 has a sign, two bits of exponent and one of mantissa. e8m0 is an exponent alone, with 255 for NaN. s0e5m3
of kernels is a float16 without its sign and the lowest seven bits of its mantissa. Source:
compressed-tensors 0.20.0, modelopt 0.47.0, torchao 0.18.0, transformers 5.23.0 and vLLM 0.11.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qload import devices
from qload.devices import Meaning
from qload.lazy_torch import Tensor, torch

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX_GROUP = 32  # elements with one e8m0 scale in OCP Microscaling
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))  # the value of each code

MANTISSA = 23  # mantissa bits of float32
DROPPED = 7  # mantissa bits of float16 beyond those of s0e5m3
SIGN = -0x8000  # sign bit of a 16-bit word
HALF, NAN = 0x400000, 0x7FC00000  # float32 bits of 2**-127 (subnormal) and of NaN


def values(device: torch.device) -> Tensor:
    """Table of code values, float32 (16,), equal to `E2M1`; computed on the device without a copy.

    The three magnitude bits become the highest mantissa bit and the lowest two exponent bits of a float16.
    """
    codes = torch.arange(len(E2M1), device=device, dtype=torch.int16)
    as_half = ((codes << 12) & SIGN | (codes & 7) << 9).view(torch.float16)
    return as_half.float() * 2.0**14


def pack(codes: Tensor) -> Tensor:
    """Pack codes (..., C) in [0, 16) into bytes (..., C / 2), the first of two in the low bits.

    ArgumentError for codes of another dtype or out of range.
    """
    devices.check_integers(codes)
    devices.check_codes(codes, 4)
    low, high = codes.to(torch.uint8).reshape(*codes.shape[:-1], -1, 2).unbind(-1)
    return low | (high << 4)


def e8m0(exponents: Tensor) -> Tensor:
    """Decode e8m0: uint8 exponents -> 2**(exponent - 127), exact in float32; 255 -> NaN."""
    bits = exponents.to(torch.int32) << MANTISSA
    bits = bits.masked_fill(exponents == 0, HALF).masked_fill(exponents == 255, NAN)
    return bits.view(torch.float32)


def s0e5m3(values: Tensor) -> Tensor:
    """Encode s0e5m3: non-negative float16 with at most three mantissa bits -> uint8."""
    return (values.view(torch.int16) >> DROPPED).to(torch.uint8)


def from_s0e5m3(stored: Tensor) -> Tensor:
    """Decode s0e5m3: uint8 -> the encoded float16, as float32."""
    return (stored.to(torch.int16) << DROPPED).view(torch.float16).float()


BITS = 4


@dataclass(frozen=True, eq=False)
class NibblePairs:
    """Four-bit codes (R, C) in `bytes`, uint8 (R, C / 2). `high_first`: the first of two is the high half."""

    bytes: Tensor
    high_first: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the codes, (R, C)."""
        rows, half = self.bytes.shape
        return rows, 2 * half

    @property
    def T(self) -> Tensor:
        """Transposed codes (C, R), unpacked."""
        return self.plain().T

    def __getitem__(self, rows: Tensor) -> NibblePairs:
        """Gather rows: row i is row rows[i]."""
        return NibblePairs(self.bytes[rows], self.high_first)

    def plain(self) -> Tensor:
        """Unpack the codes to uint8."""
        halves = [self.bytes & 15, self.bytes >> 4]
        return torch.stack(halves[::-1] if self.high_first else halves, dim=-1).flatten(-2)

    def values(self, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the values of codes by `lookup` in blocks of rows with `count` values, as `devices.values`.

        One lookup serves both codes of a byte.
        """
        if lookup is None:
            yield from devices.values(self.plain(), None, count)
            return
        low, high = lookup[: 1 << BITS].repeat(1 << BITS), lookup[: 1 << BITS].repeat_interleave(1 << BITS)
        pair_values = torch.view_as_complex(
            torch.stack([high, low] if self.high_first else [low, high], dim=1)
        )
        for rows, pairs in devices.values(self.bytes, pair_values, count // 2):
            yield rows, torch.view_as_real(pairs).flatten(1)

    def dequantize(self, meaning: Meaning, out: Tensor) -> bool:
        """Dequantize bytes to `out` by `meaning` in one pass; False if this is not supported."""
        return devices.dequantize_rows(self.bytes, BITS, meaning, self.high_first, out)
