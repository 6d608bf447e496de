"""What the floats of a tensor are like: their range, and how large most of them are.

The range is that of all values, and NaN where one is. Quantiles are those of a few from each piece, in even
steps.
"""

from dataclasses import dataclass
from math import inf, isfinite, isnan, nan

import torch
from torch import Tensor

from qload.formats.unquantized import FLOATS

DRAWN = 512  # values of a piece of which quantiles are taken
SHARES = (0.05, 0.5, 0.95)  # of the values, below which a quantile is
NOT_A_NUMBER = {torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}  # where the sign's bit alone is NaN
OTHER = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The range of a tensor's floats; of its magnitudes, the quantiles 0.05, 0.5 and 0.95 without zeros.

    `retyped`: the same of the bits of fp16 read as bf16, and of those of bf16 as fp16; of others zeros.
    `least`: the smallest magnitude but zero, of scales alone; `zeros`: how many of these are zero.
    """

    low: float
    high: float
    quantiles: tuple[float, float, float]
    count: int
    retyped: tuple[float, float, float] = (0.0, 0.0, 0.0)
    least: float = nan
    zeros: int = 0

    @property
    def largest(self) -> float:
        """The largest magnitude; NaN where a value is."""
        return nan if isnan(self.low) or isnan(self.high) else max(abs(self.low), abs(self.high))

    @property
    def median(self) -> float:
        """Of the magnitudes that are not zero."""
        return self.quantiles[1]

    @property
    def finite(self) -> bool:
        """Whether every value is."""
        return isfinite(self.largest)


class NumbersOf:
    """Accumulates pieces of a tensor of floats. `fully`: count zeros, and tell the least magnitude."""

    def __init__(self, *, exponents: bool = False, fully: bool = False) -> None:
        self._exponents, self._fully = exponents, fully
        self._low, self._high, self._least, self._zeros, self._count = inf, -inf, inf, 0, 0
        self._drawn: list[Tensor] = []

    def add(self, piece: Tensor) -> None:
        """The next elements."""
        if self._exponents:
            piece = piece.view(torch.float8_e8m0fnu)
        low, high = _range(piece)
        self._low = low if isnan(low) or low < self._low else self._low
        self._high = high if isnan(high) or high > self._high else self._high
        self._count += len(piece)
        self._drawn.append(piece[:: max(1, len(piece) // DRAWN)].clone())
        if self._fully:
            size = piece.float().abs()
            zeros = size == 0
            self._zeros += int(zeros.sum())
            self._least = min(self._least, float(torch.where(zeros, inf, size).nan_to_num(inf, inf).min()))

    def finish(self) -> Numbers:
        """What all pieces together are."""
        drawn = torch.cat(self._drawn) if self._drawn else torch.zeros(0)
        other = OTHER.get(drawn.dtype)
        retyped = (0.0, 0.0, 0.0) if other is None else _quantiles(drawn.view(other))
        if not self._count:
            self._low = self._high = 0.0
        return Numbers(
            self._low, self._high, _quantiles(drawn), self._count, retyped, self._least, self._zeros
        )


def _quantiles(values: Tensor) -> tuple[float, float, float]:
    sizes = values.float().abs()
    sizes = sizes[(sizes > 0) & sizes.isfinite()].sort().values
    if not len(sizes):
        return 0.0, 0.0, 0.0
    low, middle, high = sizes[[int(share * (len(sizes) - 1)) for share in SHARES]].tolist()
    return low, middle, high


def _range(piece: Tensor) -> tuple[float, float]:
    if piece.dtype in FLOATS:
        low, high = torch.aminmax(piece)
        return float(low), float(high)
    bits = piece.view(torch.uint8)
    if piece.dtype not in EIGHT_BITS:  # exponents alone
        low, high = (bound.view(piece.dtype).float() for bound in torch.aminmax(bits))
        return (nan, nan) if isnan(high) else (float(low), float(high))
    if piece.dtype in NOT_A_NUMBER and bool((bits == NOT_A_NUMBER[piece.dtype]).any()):
        return nan, nan
    size = int((bits & 127).max())
    largest, signed = (
        torch.tensor([size, int(bits.max())], dtype=torch.uint8).view(piece.dtype).float().tolist()
    )
    return min(signed, 0.0) if size else 0.0, largest
