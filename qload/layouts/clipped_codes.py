"""Words that hold more codes than there are: a kernel's padding, or a last word that is short of codes."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from qload.devices import Meaning
from qload.layouts.packed_codes import PackedCodes


@dataclass(frozen=True, eq=False)
class ClippedCodes:
    """The first rows and columns of `packed` codes, `shape` of them, still in words."""

    packed: PackedCodes
    shape: tuple[int, int]

    @property
    def T(self) -> "ClippedCodes":
        """(C, R)."""
        return ClippedCodes(self.packed.T, self.shape[::-1])

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Row i is row rows[i], spelled out."""
        return self.plain()[rows]

    def plain(self) -> Tensor:
        """The codes as numbers, int32."""
        R, C = self.shape
        return self.packed.plain()[:R, :C]

    def values(self, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
        """What the codes stand for by `lookup`, `count` at a time, rows after rows, see `devices.values`."""
        R, C = self.shape
        for rows, values in self.packed.values(lookup, count):
            if rows.start < R:
                yield slice(rows.start, min(rows.stop, R)), values[: R - rows.start, :C].contiguous()

    def dequantize(self, meaning: Meaning, out: Tensor) -> bool:
        """What codes of this `meaning` are, in one pass from words to `out`; False where nothing was done."""
        return self.packed.order is None and self.packed.dequantize(meaning, out)
