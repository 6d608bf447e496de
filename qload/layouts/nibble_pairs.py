"""Codes of four bits, two a byte, row by row: what bitsandbytes and the four-bit floats are stored as."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qload import devices
from qload.devices import Meaning

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
