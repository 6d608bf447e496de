"""Codes of four bits, two a byte, row by row: what bitsandbytes and the four-bit floats are stored as."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qload import native

BITS = 4


@dataclass(frozen=True, eq=False)
class Pairs:
    """Codes (R, C) in bytes, uint8 (R, C / 2). `high_first`: the first of two lies in the high bits."""

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

    def __getitem__(self, rows: Tensor) -> "Pairs":
        """Row i is row rows[i]."""
        return Pairs(self.bytes[rows], self.high_first)

    def plain(self) -> Tensor:
        """The codes as numbers, uint8."""
        halves = [self.bytes & 15, self.bytes >> 4]
        return torch.stack(halves[::-1] if self.high_first else halves, dim=-1).flatten(-2)

    def dequantize(self, meaning: native.Meaning, out: Tensor) -> bool:
        """What the codes mean, in one pass from the bytes to `out`; False where nothing was done."""
        return native.dequantize_rows(self.bytes, BITS, meaning, self.high_first, out)
