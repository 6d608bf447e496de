"""Tensor-parallel and expert-parallel sharing of layers: axis, cuts, bytes per rank."""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from qload.architecture import architecture_of
from qload.errors import ArgumentError, ConfigError, CutError, QloadError, RepackError
from qload.experts.local import grid, local_experts
from qload.experts.names import names_of
from qload.experts.source import ExpertSource
from qload.listing import Groups
from qload.loader import Heads, LayerDescription, Part, Split, WeightsLoader
from qload.loader.cuts import Share, share
from qload.loader.formats import shares_of
from qload.models import FAMILIES
from qload.models.config import TextConfig, text_config
from qload.models.stored_layers import SharedMatrix, end_matrices, experts_of, layer_matrices, text_within
from qload.parallel import Rank
from qload.repacking import RepackingLoader
from qload.repacking.header_only import HeaderOnlySource
from qload.spec import TensorSpec, Weight
from qload.weights import Weights

COLUMN = re.compile(
    r"(q|k|v|qkv|gate|up|gate_up|q_b|kv_b)_proj|w1|w3|fc1|query_key_value|dense_h_to_4h|c_fc|lm_head"
)
ROW = re.compile(r"(o|out|down)_proj|w2|fc2|dense|dense_4h_to_h|c_proj")


def usual_split(prefix: str) -> Split | None:
    """Along what the layer under `prefix` is usually cut; None: no usual name, or every rank has all."""
    name = prefix.rpartition(".")[2]
    return "N" if COLUMN.fullmatch(name) else "K" if ROW.fullmatch(name) else None


def usual_matrix(prefix: str, heads: Heads | None) -> SharedMatrix:
    """How ranks usually share the layer under `prefix`, whose outputs are `heads`; None: they are none."""
    return SharedMatrix(prefix, "N" if heads is not None else usual_split(prefix), heads)


USUAL = "layers are cut as is usual by the last part of their names"


def described_model(config: Mapping[str, object]) -> tuple[TextConfig | None, str]:
    """The model, as `load_model` makes it, and ""; or None, and a note that says why there is none."""
    try:
        known = architecture_of(config)
        if known is None or known.type not in FAMILIES:
            return None, f"no model of qload's has this type: {USUAL}"
        return text_config(config), ""
    except ConfigError as error:
        said = f"{error.file}: {error.key}, expected {error.expected}, got {error.got}"
        return None, f"load_model refuses this model ({said}): {USUAL}"


def held_bytes(shares: Sequence[Share]) -> int:
    """Of the shares of one layer's parts that a rank loads together, as they are stored.

    A tensor that is not cut along the outputs is held once.
    """
    layer, total = shares[0].layer, 0
    for spec in layer.specs:
        pieces = shares if spec.joined() is not None else shares[:1]
        total += sum(_elements(spec, one) for one in pieces) * layer.dtypes[spec.name].itemsize
    return total


def _elements(spec: TensorSpec, share: Share) -> int:
    """How many entries of a tensor are in a share."""
    count, here, sizes = 1, share.bounds, share.layer.sizes
    for axis in spec.places:
        piece = share.piece(axis)
        whole = axis.size(axis.logical(sizes) or 0) or 0
        count *= whole if piece is None else piece[1] - piece[0]
        if axis.flat and not here.all_inputs:  # rows of all elements, of which some columns stay
            count = count * (here.k1 - here.k0) // here.K
    return count


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
    base, head = text_within(weights)
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
