"""Codes that still lie in words: turned, gathered, packed again or dequantized without being spelled out.

    marlin.rows(4).pack(gptq.rows(4).packed(qweight)[perm])

is one pass over the words where there is native code, and `pack(unpack(qweight)[perm])` where there is none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from qload import devices
from qload.devices import CodesInWords, Meaning


@dataclass(frozen=True, eq=False)
class PackedCodes(CodesInWords):
    """Codes (R, C) in the `words` of a `packing`. `turned`: the words hold (C, R).

    `order`: row i, or column i of turned ones, is row order[i] of what the words hold.
    """

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
        codes = devices.writable(self.words, self.packing.shape_of_codes(self.words.shape), torch.int32, None)
        devices.unpack(self.packing, self.words, codes)
        codes = codes if self.order is None else codes[self.order]
        return codes.T if self.turned else codes

    def values(self, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
        """What the codes stand for by `lookup`, `count` at a time, rows after rows, see `devices.values`."""
        if self.order is not None and not self.turned:  # rows from anywhere
            yield from devices.values(self.plain(), lookup, count)
            return
        for rows, codes in devices.rows_of_codes(self.packing, self.words, self.turned, count):
            ordered = codes if self.order is None else codes.index_select(1, self.order)
            yield rows, devices.stood_for(ordered, lookup)

    def dequantize(self, meaning: Meaning, out: Tensor) -> bool:
        """What codes of this `meaning` are, in one pass from words to `out`; False where nothing was done."""
        return devices.dequantize_words(self, meaning, out)
