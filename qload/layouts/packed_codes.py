"""Codes that still lie in words: turned, gathered, packed again or dequantized without being spelled out.

    marlin.rows(4).pack(gptq.rows(4).packed(qweight)[perm])

is one pass over the words where there is native code, and `pack(unpack(qweight)[perm])` where there is none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from qload import native
from qload.layouts import natively, plainly

if TYPE_CHECKING:
    from qload.layouts.packing import Packing


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """Codes (R, C) in the `words` of a `packing`. `turned`: the words hold (C, R).

    `order`: row i, or column i of turned ones, is row order[i] of what the words hold.
    """

    packing: "Packing"
    words: Tensor
    turned: bool = False
    order: Tensor | None = None

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(R, C)."""
        rows, columns = self.packing.shape_of(self.words)
        rows = rows if self.order is None else self.order.numel()
        return (columns, rows) if self.turned else (rows, columns)

    @property
    def T(self) -> Self:
        """(C, R)."""
        return replace(self, turned=not self.turned)

    def __getitem__(self, rows: Tensor) -> "PackedCodes | Tensor":
        """Row i is row rows[i]; of turned ones spelled out."""
        if self.turned:
            return self.plain()[rows]
        return replace(self, order=rows if self.order is None else self.order[rows])

    def plain(self) -> Tensor:
        """The codes as numbers, int32."""
        codes = self.packing.unpack(self.words)
        codes = codes if self.order is None else codes[self.order]
        return codes.T if self.turned else codes

    def values(self, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
        """What the codes stand for by `lookup`, `count` at a time, rows after rows, see `native.values`."""
        if self.order is not None and not self.turned:  # rows from anywhere
            yield from native.values(self.plain(), lookup, count)
            return
        for rows, codes in plainly.rows(self.packing, self.words, self.turned, count):
            ordered = codes if self.order is None else codes.index_select(1, self.order)
            yield rows, native.stood_for(ordered, lookup)

    def dequantize(self, meaning: native.Meaning, out: Tensor) -> bool:
        """What codes of this `meaning` are, in one pass from words to `out`; False where nothing was done."""
        if not natively.is_whole(self.packing):
            return natively.dequantize_stream(self, meaning, out)
        if self.order is not None and not self.turned:
            return False
        if self.order is not None and self.words.is_cuda:
            ordered = self._in_order()
            return ordered is not None and ordered.dequantize(meaning, out)
        axes = natively.places(self.packing, tuple(self.packing.shape_of(self.words)))
        rows, columns = axes[::-1] if self.turned else axes
        place = None
        if self.order is not None:
            K = self.order.numel()
            place = torch.empty(K, dtype=torch.int32)
            place[self.order.long()] = torch.arange(K, dtype=torch.int32)
            meaning = natively.of_order(meaning, self.order)
        return native.dequantize(
            self.words.contiguous(), self.packing.bits, rows, columns, meaning, place, out
        )

    def _in_order(self) -> "PackedCodes | None":
        """The same codes in words of their own, row by row and in order, where they fill words."""
        packing, (_, columns) = self.packing, self.shape
        count = natively.WORD_BITS // packing.bits
        if columns % count:
            return None
        rows = type(packing)(packing.bits, "r (cp i) -> r cp i", i=count)
        return rows.packed(rows.pack(self))
