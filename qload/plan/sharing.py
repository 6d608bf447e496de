"""How ranks share each layer of a checkpoint: as the model that is loaded, or as its name is usually cut."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from qload.errors import ArgumentError, CutError, QloadError
from qload.experts.local import grid, local_experts
from qload.experts.names import names_of
from qload.experts.source import ExpertSource
from qload.listing import Groups
from qload.loader import LayerDescription, Part
from qload.loader.cuts import Share, share
from qload.loader.formats import shares_of
from qload.models.config import TextConfig
from qload.models.stored_layers import (
    SharedMatrix,
    end_matrices,
    experts_of,
    layer_matrices,
    text_prefix_and_head,
)
from qload.parallel import Rank
from qload.plan.held import held_bytes
from qload.plan.usual import usual_matrix
from qload.weights import Weights

Cut = Literal["N", "K", "experts", "whole"]
MOST_RANKS = 1 << 16  # each of which is asked for its share of every kind of layer


@dataclass(frozen=True)
class Sharing:
    """How ranks share a layer.

    `matrix`: along what they cut it. `joined`: whether its end is a cut like any other, as another layer
    follows in one weight. `expert`: its number and how many there are, where `runs` of ranks share out whole
    experts, those of `experts`.
    """

    matrix: SharedMatrix
    joined: bool = False
    expert: tuple[int, int] | None = None
    runs: int = 1
    experts: str = field(default="", compare=False)

    @property
    def cut(self) -> Cut:
        """In a word."""
        return "experts" if self.expert else self.matrix.split or "whole"

    @property
    def question(self) -> Hashable:
        """The same of any layer that is alike, but for the last part of its name."""
        matrix = self.matrix
        last = matrix.prefix.rpartition(".")[2]
        how = matrix.split, matrix.heads, matrix.blocks, matrix.short
        return last, how, self.joined, self.expert, self.runs

    def group(self, place: int, ranks: int) -> Rank | None:
        """Those of `ranks` that share the layer, and which of them `place` is; None: it has nothing of it."""
        group = Rank(place, ranks)
        if self.expert is None:
            return group
        expert, count = self.expert
        groups = grid("both", group, self.runs)
        local = local_experts(self.experts, count, groups.experts)
        if not local.start <= expert < local.stop:
            return None
        return Rank(groups.tensor.rank(), groups.tensor.size())


def check_ranks(tp: int | Sequence[int], ep: int | None) -> list[int]:
    """The numbers of ranks, each once; ArgumentError for none, and for more than are asked one by one."""
    worlds = list(dict.fromkeys(tp if isinstance(tp, Sequence) else (tp,)))
    if not worlds or not 1 <= min(worlds) <= max(worlds) <= MOST_RANKS or (ep is not None and ep < 1):
        raise ArgumentError("tp", f"numbers of ranks, 1 to {MOST_RANKS}", f"tp={tp}, ep={ep}")
    return worlds


def sharings(groups: Groups, config: TextConfig | None, runs: int | None) -> dict[str, Sharing]:
    """How each layer is shared, in the order of a load; `runs`: of ranks that share out whole experts."""
    weights = groups.weights
    told = {} if config is None else {each.matrix.prefix: each for each in _of_model(weights, config, runs)}
    if runs is not None and not any(each.expert for each in told.values()):
        raise ArgumentError("ep", "a model with experts, of a type that load_model loads", str(runs))
    rest = (prefix for prefix in groups.layers if prefix not in told)
    known = weights.architecture
    for prefix in rest:
        layer = groups.layers[prefix]
        matrix = SharedMatrix(prefix, None)
        if config is None and isinstance(layer, LayerDescription) and "K" in layer.sizes:
            matrix = usual_matrix(prefix, known.heads(prefix) if known else None)
        told[prefix] = Sharing(matrix)
    return told


def _of_model(weights: Weights, config: TextConfig, runs: int | None) -> Iterator[Sharing]:
    """The layers that the model's own load cuts."""
    base, head = text_prefix_and_head(weights)
    for layer in range(config.layers):
        for matrix in layer_matrices(weights, config, base, layer):
            yield Sharing(matrix)
        if config.sparse(layer):
            yield from _of_experts(weights, experts_of(weights, config, base, layer), runs)
    for matrix in end_matrices(weights, base, head):
        yield Sharing(matrix)


def _of_experts(weights: Weights, prefix: str, runs: int | None) -> Iterator[Sharing]:
    """Gate and up along their outputs, in one weight, and down along its inputs; or whole experts."""
    try:
        names = names_of(weights, prefix)
    except QloadError:  # which each of its layers says, or the load of a whole model
        return
    for expert in range(names.count):
        place = None if runs is None else (expert, names.count)
        gate, up, down = names.of(expert)
        yield Sharing(SharedMatrix(gate, "N"), True, place, runs or 1, prefix)
        yield Sharing(SharedMatrix(up, "N"), False, place, runs or 1, prefix)
        yield Sharing(SharedMatrix(down, "K"), False, place, runs or 1, prefix)


def bytes_held(weights: Weights, layer: LayerDescription, how: Sharing, ranks: int) -> tuple[int, ...]:
    """What each of so many ranks holds of a layer; CutError or DivideError, as its load raises it."""
    if how.cut == "whole":
        return (held_bytes(next(_shares(weights, layer, how, ranks))),) * ranks
    return tuple(held_bytes(found) if found else 0 for found in _shares(weights, layer, how, ranks))


def _shares(weights: Weights, layer: LayerDescription, how: Sharing, ranks: int) -> Iterator[Sequence[Share]]:
    for place in range(ranks):
        group = how.group(place, ranks)
        tensor = group or Rank(0, ranks // how.runs)
        parts = how.matrix.parts(layer.N, tensor.size())
        found = _cut(weights, layer, how, parts, tensor)
        yield found if group else ()


def _cut(
    weights: Weights, layer: LayerDescription, how: Sharing, parts: Sequence[Part], group: Rank
) -> list[Share]:
    """A rank's share of each part: of all in one weight, or where that cannot be one by one, as loads do."""
    split = how.matrix.split
    if len(parts) == 1:
        return [share(layer, parts[0], split, group, joined=how.joined)]
    try:
        return shares_of(ExpertSource(weights, group), {layer.prefix: layer}, parts, split)
    except CutError:
        return [share(layer, part, split, group) for part in parts]
