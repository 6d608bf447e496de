"""One layer as one rank has it: how it is loaded, and which tensors say that in a file."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from qload.conversion.items import Item, of_tensors, stored_bytes, stored_tensors
from qload.errors import QloadError
from qload.loader import LayerDescription, Part, Split
from qload.methods.biases import check_bias, read_bias
from qload.plan.sharing import Sharing
from qload.repacking.header_only import HeaderOnlySource
from qload.spec import Weight, named
from qload.storage import MemoryStorage
from qload.weights import Weights


@dataclass(frozen=True)
class RankShare:
    """A rank's share of a layer; `weights`: as the rank sees them among those that share it."""

    weights: Weights
    layer: LayerDescription
    parts: list[Part]
    split: Split | None

    @classmethod
    def of(
        cls, weights: Weights, layer: LayerDescription, how: Sharing, rank: int, ranks: int
    ) -> "RankShare | None":
        """The share of number `rank` of `ranks`; None: it has nothing of the layer. CutError, DivideError."""
        group = how.group(rank, ranks)
        if group is None:
            return None
        mine = weights.of_group(group)
        return cls(mine, layer, how.matrix.parts(layer.N, group.size()), how.matrix.split)

    def load(self) -> Weight:
        """The typed weight, as a load of a model makes it."""
        return self.weights.loader.load(self.weights, self.parts, self.split)

    def bias(self, weight: Weight) -> Tensor | None:
        """What it adds to its outputs, as the rank has it; of shares of inputs the first rank alone."""
        prefix = self.layer.prefix
        if not check_bias(self.weights, prefix, self.layer.N):
            return None
        return read_bias(self.weights, self.parts, weight, self.split)

    def _stored(self, weight: Weight) -> Iterator[tuple[str, Tensor]]:
        yield from stored_tensors(weight).items()
        bias = self.bias(weight)
        if bias is not None:
            yield named(self.layer.prefix, "bias"), bias

    def outline(self) -> dict[str, Tensor]:
        """What is stored of the share, by name; zeros, which share one element, for the codes."""
        source = HeaderOnlySource.without_codes(self.weights, self.layer)
        return dict(self._stored(self.weights.loader.load(source, self.parts, self.split)))

    def why_not(self) -> str | None:
        """Why files of the share alone would not be read as it, or None: they are asked for as a layer."""
        try:
            alone = Weights(MemoryStorage(self.outline()), loader=self.weights.loader)
            self.weights.loader.shape(alone, self.layer.prefix)
        except QloadError as error:
            return f"its share by itself is no {self.layer.format.weight_type.format} layer: {error}"
        return None

    def item(self) -> Item:
        """What stands in the rank's file."""
        source = stored_bytes(self.weights, self.layer)
        return of_tensors(self.outline(), source, lambda: dict(self._stored(self.load())), copied=True)
