"""Integer codes that need not be spelled out as numbers: in words as they lie."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from qload.devices.meaning import Meaning
from qload.errors import ArgumentError, check_values
from qload.sentences import WordSentence

INTEGERS = (torch.int32, torch.uint8, torch.int64, torch.int16, torch.int8)


@dataclass(frozen=True, eq=False)
class CodesInWords:
    """Codes (R, C) in the words of a packing. `turned`: the words hold (C, R).

    `order`: row i, or column i of turned ones, is row order[i] of what the words hold.
    """

    packing: WordSentence
    words: Tensor
    turned: bool = False
    order: Tensor | None = None

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(R, C)."""
        rows, columns = self.packing.shape_of_codes(self.words.shape)
        rows = rows if self.order is None else self.order.numel()
        return (columns, rows) if self.turned else (rows, columns)


@runtime_checkable
class LazyCodes(Protocol):
    """Integer codes (R, C), still packed."""

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C)."""

    @property
    def T(self) -> "Tensor | LazyCodes":
        """(C, R)."""

    def __getitem__(self, rows: Tensor) -> "Tensor | LazyCodes":
        """Row i is row rows[i]."""

    def plain(self) -> Tensor:
        """The codes as numbers, int32 or uint8 (R, C)."""

    def values(self, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
        """What the codes stand for, see `values`."""

    def dequantize(self, meaning: Meaning, out: Tensor) -> bool:
        """What the codes mean, in one pass from the words to `out`; False where nothing was done."""


def plain(codes: Tensor | LazyCodes) -> Tensor:
    """Codes as numbers, whether they still lie in words or not."""
    return codes if isinstance(codes, Tensor) else codes.plain()


def values(codes: Tensor | LazyCodes, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows after rows, about `count` codes at a time, and what they stand for, new float32 (rows, C).

    `lookup`: (2**bits,) what each code stands for; None: itself.
    """
    if not isinstance(codes, Tensor):
        yield from codes.values(lookup, count)
        return
    R, C = codes.shape
    step = max(1, count // max(C, 1))
    for start in range(0, R, step):
        rows = slice(start, min(start + step, R))
        yield rows, stood_for(codes[rows], lookup)


def stood_for(codes: Tensor, lookup: Tensor | None) -> Tensor:
    """What codes stand for, new float32."""
    if lookup is None:
        return codes.to(torch.float32, memory_format=torch.contiguous_format)
    return lookup.gather(0, codes.flatten().long()).view(codes.shape)


def check_integers(codes: Tensor) -> None:
    """Whole numbers of a dtype that torch counts in, and values, or ArgumentError."""
    if codes.dtype not in INTEGERS:
        known = ", ".join(_word(dtype) for dtype in INTEGERS)
        raise ArgumentError("codes", f"integers: {known}", _word(codes.dtype))
    check_values("codes", codes)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_codes(codes: Tensor, bits: int) -> None:
    """0 <= code < 2**bits for all of them, or ArgumentError with the range that they have."""
    low, high = map(int, codes.aminmax()) if codes.numel() else (0, 0)
    if low < 0 or high >= 2**bits:
        raise ArgumentError("codes", f"0 <= code < {2**bits}", f"{low} to {high}")
