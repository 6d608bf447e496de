"""A layer without the values of one tensor, its codes: enough to decide by, and cheap to read."""

from collections.abc import Iterable
from typing import Self

from torch import Tensor

from qload.loader import LayerDescription, TensorSource
from qload.loader.source import WrappedSource
from qload.spec import Role


class HeaderOnlySource(WrappedSource):
    """What an inner source holds; a tensor named `skipped` has its shape and no values.

    Nothing is entered into the ledger: whoever only decides has loaded nothing.
    """

    def __init__(self, inner: TensorSource, skipped: str) -> None:
        super().__init__(inner)
        self.skipped = skipped
        self.nonfinite = "allow"  # the load itself refuses

    @classmethod
    def without_codes(cls, inner: TensorSource, layer: LayerDescription) -> Self:
        """All of a layer but its codes, which are the first tensor of its format."""
        return cls(inner, layer.names.full(layer.specs[0].name).rpartition(".")[2])

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """As the inner source, or for a skipped tensor zeros of its shape, which share one element."""
        if not self.skipped or name.rpartition(".")[2] != self.skipped:
            return self.inner.read(name, index, role=role)
        nothing = self.inner.read(name, (slice(0, 0),), role=role)
        return nothing.new_zeros(()).expand(self.inner.info(name).shape)[index]

    def take(self, names: Iterable[str]) -> None:
        """Nothing was loaded."""

    def note(self, text: str) -> None:
        """The load itself notes what there is to note."""
