"""Values beside values: equal bits, equal after one rounding, or where they are not."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qload.diff.report import Outcome
from qload.spec import Weight
from qload.verify.comparison import NARROW, equal_bits


@dataclass
class ValueDiff:
    """Two tensors in runs of outputs.

    `bits`: whether all were equal so far, bit by bit. `first`: the place of the first that is not equal after
    rounding, with both values; `run`: the outputs that it is among.
    """

    bits: bool = True
    differing: int = 0
    total: int = 0
    first: tuple[tuple[int, ...], float, float] | None = None
    run: tuple[int, int] = (0, 0)

    @property
    def outcome(self) -> Outcome:
        """In a word."""
        return "bits" if self.bits else "differs" if self.differing else "rounded"

    def add(self, start: int, got: Tensor, want: Tensor, dtype: torch.dtype | None) -> None:
        """One more run, the first output of which is `start`; `dtype`: what both are rounded to."""
        self.total += got.numel()
        if got.dtype == want.dtype and equal_bits(got, want):
            return
        self.bits = False
        if dtype is not None:
            got, want = got.to(dtype), want.to(dtype)
        if got.dtype == want.dtype and equal_bits(got, want):
            return
        apart = (got != want) & ~(got.isnan() & want.isnan())
        count = int(apart.sum())
        self.differing += count
        if count and self.first is None:
            place = torch.nonzero(apart)[0].tolist()
            self.first = (_moved(place, start), float(got[tuple(place)]), float(want[tuple(place)]))
            self.run = (start, start + (got.shape[0] if got.ndim else 1))


def rounds_to(one: Weight, other: Weight, dtype: torch.dtype | None) -> bool:
    """Whether one of both is plain, of the narrow `dtype`, and what the other means rounds to its very bits.

    False says nothing: two plain weights are not asked, nor those whose inputs have factors.
    """
    plain, coded = (one, other) if one.plain else (other, one)
    if not plain.plain or coded.plain or coded.input_factors is not None:
        return False
    want = plain.fields()["weight"]
    return want.dtype == dtype and equal_bits(coded.dequantize(want.dtype), want)


def rounding(*dtypes: torch.dtype | None) -> torch.dtype | None:
    """The narrowest of the float types of plain values, which all are rounded to; None: there is none."""
    narrow = [dtype for dtype in dtypes if dtype in NARROW]
    return min(narrow, key=lambda dtype: torch.finfo(dtype).bits) if narrow else None


def _moved(place: list[int], start: int) -> tuple[int, ...]:
    return (place[0] + start, *place[1:]) if place else ()
