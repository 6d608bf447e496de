"""The first rank's share of a layer, that can be repacked: all of it but its codes is read."""

from dataclasses import dataclass

from qload.errors import RepackError
from qload.loader import LayerDescription, Part, Split, WeightsLoader
from qload.parallel import Rank
from qload.plan.sharing import Sharing
from qload.repacking import RepackingLoader
from qload.repacking.header_only import HeaderOnlySource
from qload.spec import Weight
from qload.weights import Weights


@dataclass(frozen=True)
class FirstShare:
    """What a share is loaded with, and from what: zeros stand for its codes."""

    source: HeaderOnlySource
    loader: WeightsLoader
    parts: list[Part]
    split: Split | None

    def load(self, loader: WeightsLoader) -> Weight:
        """By a loader that repacks."""
        return loader.load(self.source, self.parts, self.split)

    def why_not(self, layout: str) -> str | None:
        """Why the layout of a kernel cannot say it, or None."""
        try:
            self.load(RepackingLoader(self.loader, layout))
        except RepackError as error:
            return error.reason
        return None


def first_share(weights: Weights, layer: LayerDescription, how: Sharing, ranks: int) -> FirstShare:
    """Its cuts checked, and nothing read; CutError or DivideError."""
    group = Rank(0, ranks // how.runs if how.expert else ranks)
    mine = weights.of_group(group)
    parts, split = how.matrix.parts(layer.N, group.size()), how.matrix.split
    mine.loader.plan(mine, parts, split)
    return FirstShare(HeaderOnlySource.without_codes(mine, layer), mine.loader, parts, split)
