"""Four-bit codes, two per byte with the first in the low bits, and power-of-two scales (e8m0)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qload import devices
from qload.devices import Meaning

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))  # the value of each code

MANTISSA = 23  # bits of a float32's
DROPPED = 7  # bits of a float16 that s0e5m3 has not
SIGN = -0x8000  # of 16 bits
HALF, NAN = 0x400000, 0x7FC00000  # float32 bits of 2**-127, which is subnormal, and of NaN


def values(device: torch.device) -> Tensor:
    """What each code means, float32 (16,): `E2M1`, made on the device, which nobody waits for.

    Its three bits are the highest of a float16's mantissa and the lowest two of its exponent.
    """
    codes = torch.arange(len(E2M1), device=device, dtype=torch.int16)
    as_half = ((codes << 12) & SIGN | (codes & 7) << 9).view(torch.float16)
    return as_half.float() * 2.0**14


def pack(codes: Tensor) -> Tensor:
    """Codes (..., C) in [0, 16) -> bytes (..., C / 2), as of `NibblePairs`, the first in the low bits.

    ArgumentError for codes that are no integers or do not fit.
    """
    devices.check_integers(codes)
    devices.check_codes(codes, 4)
    low, high = codes.to(torch.uint8).reshape(*codes.shape[:-1], -1, 2).unbind(-1)
    return low | (high << 4)


def e8m0(exponents: Tensor) -> Tensor:
    """uint8 exponents -> 2**(exponent - 127), float32 and exact; 255 -> NaN."""
    bits = exponents.to(torch.int32) << MANTISSA
    bits = bits.masked_fill(exponents == 0, HALF).masked_fill(exponents == 255, NAN)
    return bits.view(torch.float32)


def s0e5m3(values: Tensor) -> Tensor:
    """float16 of at most three bits of mantissa and no sign -> uint8."""
    return (values.view(torch.int16) >> DROPPED).to(torch.uint8)


def from_s0e5m3(stored: Tensor) -> Tensor:
    """uint8 -> the float16 that `s0e5m3` was given, as float32."""
    return (stored.to(torch.int16) << DROPPED).view(torch.float16).float()


BITS = 4


@dataclass(frozen=True, eq=False)
class NibblePairs:
    """Codes (R, C) in `bytes`, uint8 (R, C / 2). `high_first`: the first of two lies in the high bits."""

    bytes: Tensor
    high_first: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C)."""
        rows, half = self.bytes.shape
        return rows, 2 * half

    @property
    def T(self) -> Tensor:
        """(C, R), as numbers."""
        return self.plain().T

    def __getitem__(self, rows: Tensor) -> "NibblePairs":
        """Row i is row rows[i]."""
        return NibblePairs(self.bytes[rows], self.high_first)

    def plain(self) -> Tensor:
        """The codes as numbers, uint8."""
        halves = [self.bytes & 15, self.bytes >> 4]
        return torch.stack(halves[::-1] if self.high_first else halves, dim=-1).flatten(-2)

    def values(self, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
        """What the codes stand for by `lookup`, `count` at a time, rows after rows, see `devices.values`.

        The two of a byte are looked up at once.
        """
        if lookup is None:
            yield from devices.values(self.plain(), None, count)
            return
        low, high = lookup[: 1 << BITS].repeat(1 << BITS), lookup[: 1 << BITS].repeat_interleave(1 << BITS)
        two = torch.view_as_complex(torch.stack([high, low] if self.high_first else [low, high], dim=1))
        for rows, both in devices.values(self.bytes, two, count // 2):
            yield rows, torch.view_as_real(both).flatten(1)

    def dequantize(self, meaning: Meaning, out: Tensor) -> bool:
        """What codes of this `meaning` are, in one pass from bytes to `out`; False where nothing was done."""
        return devices.dequantize_rows(self.bytes, BITS, meaning, self.high_first, out)
