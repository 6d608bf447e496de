"""Tensor-parallel and expert-parallel sharing of layers: axis, cuts, bytes per rank."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

from qload.architecture import architecture_of
from qload.architecture.names import usual_split
from qload.checkpoint import LayerIndex
from qload.errors import ArgumentError, ConfigError, CutError, QloadError, RepackError
from qload.experts.expert_parallel import grid, local_experts
from qload.experts.names import find_experts
from qload.loader import LayerDescription, Part, Split, WeightsLoader
from qload.loader.sharding import Share, share, shares_of
from qload.loader.source import WrappedSource, source_without_codes
from qload.models import FAMILIES
from qload.models.config import TextConfig, text_config
from qload.models.stored_layers import (
    SharedMatrix,
    end_matrices,
    experts_of,
    layer_matrices,
    text_prefix_and_head,
)
from qload.parallel import Rank
from qload.repacking import RepackingLoader
from qload.spec import TensorSpec, Weight
from qload.weights import Weights

MAX_RANKS = 1 << 16  # each rank is computed on its own, for every kind of layer
BY_NAME = "layers are cut by the last part of their names"


def supported_text_config(config: Mapping[str, object]) -> tuple[TextConfig | None, str]:
    """Return the text config of a model that `load_model` supports, and ""; else None and a note."""
    try:
        architecture = architecture_of(config)
        if architecture is None or architecture.type not in FAMILIES:
            return None, f"qload has no model of this type: {BY_NAME}"
        return text_config(config), ""
    except ConfigError as error:
        reason = f"{error.file}: {error.key}, expected {error.expected}, got {error.got}"
        return None, f"load_model refuses this model ({reason}): {BY_NAME}"


@dataclass(frozen=True)
class Sharing:
    """Sharing of one layer among ranks.

    Attributes
    ----------
    matrix
        The axis of the cut, with its heads or blocks.
    joined
        Whether the layer is loaded as one weight with a following layer, so that its end is a cut as well.
    expert
        Number of the expert and count of experts, if whole experts are distributed; else None.
    ep
        Number of groups of ranks over which whole experts are distributed.
    experts
        Prefix of the experts.
    """

    matrix: SharedMatrix
    joined: bool = False
    expert: tuple[int, int] | None = None
    ep: int = 1
    experts: str = field(default="", compare=False)

    @property
    def cut(self) -> Literal["N", "K", "experts", "whole"]:
        """Axis of the cut in one word."""
        return "experts" if self.expert else self.matrix.split or "whole"

    @property
    def key(self) -> Hashable:
        """Key that is equal for layers of one description with the same shares."""
        matrix = self.matrix
        last = matrix.prefix.rpartition(".")[2]
        cuts = matrix.split, matrix.heads, matrix.blocks, matrix.short
        return last, cuts, self.joined, self.expert, self.ep

    def group(self, rank: int, ranks: int) -> Rank | None:
        """Return the place of `rank` in the group that shares the layer; None: it has no part of it."""
        group = Rank(rank, ranks)
        if self.expert is None:
            return group
        expert, count = self.expert
        groups = grid("both", group, self.ep)
        local = local_experts(self.experts, count, groups.experts)
        if not local.start <= expert < local.stop:
            return None
        return Rank(groups.tensor.rank(), groups.tensor.size())


def check_ranks(tp: int | Sequence[int], ep: int | None) -> list[int]:
    """Return the distinct numbers of ranks; ArgumentError for none, and for a number out of range."""
    worlds = list(dict.fromkeys(tp if isinstance(tp, Sequence) else (tp,)))
    if not worlds or not 1 <= min(worlds) <= max(worlds) <= MAX_RANKS or (ep is not None and ep < 1):
        raise ArgumentError("tp", f"numbers of ranks, 1 to {MAX_RANKS}", f"tp={tp}, ep={ep}")
    return worlds


def sharings(index: LayerIndex, config: TextConfig | None, ep: int | None) -> dict[str, Sharing]:
    """Return the sharing of each layer in load order; ArgumentError for `ep` without experts.

    The model of `config` defines the cuts; without a config, the names of layers define them.
    """
    weights, sharing_of = index.weights, {}
    if config is not None:
        sharing_of = {sharing.matrix.prefix: sharing for sharing in _model_sharings(weights, config, ep)}
    if ep is not None and not any(sharing.expert for sharing in sharing_of.values()):
        raise ArgumentError("ep", "a model with experts that load_model supports", str(ep))
    architecture = weights.architecture
    for prefix, layer in index.layers.items():
        if prefix in sharing_of:
            continue
        matrix = SharedMatrix(prefix, None)
        if config is None and isinstance(layer, LayerDescription) and "K" in layer.sizes:
            heads = architecture.heads(prefix) if architecture else None
            matrix = SharedMatrix(prefix, "N" if heads is not None else usual_split(prefix), heads)
        sharing_of[prefix] = Sharing(matrix)
    return sharing_of


def _model_sharings(weights: Weights, config: TextConfig, ep: int | None) -> Iterator[Sharing]:
    """Yield the layers that `load_model` cuts."""
    base, head = text_prefix_and_head(weights)
    for layer in range(config.layers):
        for matrix in layer_matrices(weights, config, base, layer):
            yield Sharing(matrix)
        if config.sparse(layer):
            yield from _expert_sharings(weights, experts_of(weights, config, base, layer), ep)
    for matrix in end_matrices(weights, base, head):
        yield Sharing(matrix)


def _expert_sharings(weights: Weights, prefix: str, ep: int | None) -> Iterator[Sharing]:
    """Yield gate and up, cut along the outputs in one weight, and down, cut along its inputs."""
    try:
        names = find_experts(weights, prefix)
    except QloadError:  # reported for each layer, or by the load of the whole model
        return
    for number in range(names.count):
        expert = None if ep is None else (number, names.count)
        *joined, down = names.of(number)
        for matrix in joined:
            yield Sharing(SharedMatrix(matrix, "N"), matrix is joined[0], expert, ep or 1, prefix)
        yield Sharing(SharedMatrix(down, "K"), False, expert, ep or 1, prefix)


def rank_bytes(weights: Weights, layer: LayerDescription, sharing: Sharing, ranks: int) -> tuple[int, ...]:
    """Return the stored bytes of a layer on each of `ranks`; CutError or DivideError as in a load."""
    shares = _shares(weights, layer, sharing, ranks)
    if sharing.cut == "whole":
        return (share_bytes(next(shares)),) * ranks
    return tuple(share_bytes(parts) if parts else 0 for parts in shares)


def _shares(
    weights: Weights, layer: LayerDescription, sharing: Sharing, ranks: int
) -> Iterator[Sequence[Share]]:
    """Yield the shares of each rank, one for each part of the layer."""
    for rank in range(ranks):
        group = sharing.group(rank, ranks)
        tensor_group = group or Rank(0, ranks // sharing.ep)
        parts = sharing.matrix.parts(layer.N, tensor_group.size())
        shares = _cut_parts(weights, layer, sharing, parts, tensor_group)
        yield shares if group else ()


def _cut_parts(
    weights: Weights, layer: LayerDescription, sharing: Sharing, parts: Sequence[Part], group: Rank
) -> list[Share]:
    """Cut all parts as one weight, or one by one if they cannot be one weight, as loads do."""
    split = sharing.matrix.split
    if len(parts) == 1:
        return [share(layer, parts[0], split, group, joined=sharing.joined)]
    try:
        return shares_of(group, {layer.prefix: layer}, parts, split)
    except CutError:
        return [share(layer, part, split, group) for part in parts]


def share_bytes(shares: Sequence[Share]) -> int:
    """Return the stored bytes of the parts of one layer that a rank loads together.

    A tensor without an axis of outputs is counted once.
    """
    layer, total = shares[0].layer, 0
    for spec in layer.specs:
        parts = shares if spec.joined() is not None else shares[:1]
        total += sum(_elements(spec, part) for part in parts) * layer.dtypes[spec.name].itemsize
    return total


def _elements(spec: TensorSpec, part: Share) -> int:
    """Return the number of elements of a tensor in a share."""
    count, bounds, sizes = 1, part.bounds, part.layer.sizes
    if spec.packing is not None:
        spans = [part.span(axis) or (0, axis.logical(sizes) or 0) for axis in spec.places]
        return prod(spec.packing.stored_shape([stop - start for start, stop in spans]))
    for axis in spec.places:
        piece = part.span(axis)
        length = axis.size(axis.logical(sizes) or 0) or 0
        count *= length if piece is None else piece[1] - piece[0]
        if axis.flat and not bounds.all_inputs:  # a flat axis of N * K elements, cut along K
            count = count * (bounds.k1 - bounds.k0) // bounds.K
    return count


@dataclass(frozen=True)
class RankShare:
    """Share of a layer on one rank; `weights` as seen by the rank in its group."""

    weights: Weights
    layer: LayerDescription
    parts: list[Part]
    split: Split | None

    @classmethod
    def of(cls, weights: Weights, layer: LayerDescription, sharing: Sharing, group: Rank) -> "RankShare":
        """Return the share of a place in a group; DivideError if heads or blocks cannot be divided."""
        parts = sharing.matrix.parts(layer.N, group.size())
        return cls(weights.of_group(group), layer, parts, sharing.matrix.split)

    @cached_property
    def header_source(self) -> WrappedSource:
        """Source with placeholders for the codes."""
        return source_without_codes(self.weights, self.layer)

    def load(self) -> Weight:
        """Load the typed weight as a model does."""
        return self.weights.loader.load(self.weights, self.parts, self.split)

    def load_header(self, loader: WeightsLoader | None = None) -> Weight:
        """Load the typed weight without its codes, by another loader if one is given."""
        return (loader or self.weights.loader).load(self.header_source, self.parts, self.split)

    def why_not_layout(self, layout: str) -> str | None:
        """Return why a kernel format cannot hold the share, or None."""
        try:
            self.load_header(RepackingLoader(self.weights.loader, layout))
        except RepackError as error:
            return error.reason
        return None


def first_rank_share(weights: Weights, layer: LayerDescription, sharing: Sharing, ranks: int) -> RankShare:
    """Check the cuts, and return the share of rank 0; CutError or DivideError."""
    group = Rank(0, ranks // sharing.ep if sharing.expert else ranks)
    share = RankShare.of(weights, layer, sharing, group)
    share.weights.loader.plan(share.weights, share.parts, share.split)
    return share
