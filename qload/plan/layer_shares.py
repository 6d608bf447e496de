"""Shares of each layer for several numbers of ranks, and alternatives where equal shares are refused."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from qload.errors import CutError, DivideError, QloadError
from qload.loader import LayerDescription
from qload.loader.cuts import granule
from qload.models.stored_layers import SharedMatrix
from qload.plan.rank_counts import CANDIDATES, LawfulRanks, lawful_ranks
from qload.plan.report import Alternative, LayerShare, PlannedLayer
from qload.plan.sharing import Sharing, bytes_held, first_share
from qload.weights import Weights


def alternatives(
    layer: LayerDescription, matrix: SharedMatrix, error: CutError | DivideError, ranks: int, stored: int
) -> tuple[Alternative, ...]:
    """The lawful ways to share a `layer` of `stored` bytes that an `error` refuses, the cheapest first."""
    heads = matrix.heads
    if heads is not None and isinstance(error, DivideError) and "heads" in str(error.dim):
        found = [*_of_heads(layer, matrix, ranks, stored)]
    else:
        found = [*_of_granules(layer, matrix, ranks, stored)]
    whole = stored - stored // ranks
    found.append(Alternative("whole", f"all of the layer on each of {ranks} ranks", whole))
    return tuple(sorted(found, key=lambda each: each.bytes))


def _of_heads(
    layer: LayerDescription, matrix: SharedMatrix, ranks: int, stored: int
) -> Iterator[Alternative]:
    """Heads of zeros beside those of queries; all those of keys and values where they cannot be shared."""
    queries, keys = (matrix.heads.queries, matrix.heads.keys) if matrix.heads else (None, None)
    total = (queries or 0) + 2 * (keys or 0) if queries else keys or 0
    each = stored // total if total else 0
    if queries and queries % ranks:
        padded = -(-queries // ranks) * ranks
        text = f"{padded} query heads, {padded - queries} of them zero, {padded // ranks} for each rank"
        copied = 2 * (keys or 0) * each if keys else 0
        yield Alternative("padded", text, padded // ranks * each + copied - stored // ranks)
    elif keys:
        held = (2 * keys + queries // ranks if queries else keys) * each
        yield Alternative(
            "copied", f"all {keys} key/value heads on each of {ranks} ranks", held - stored // ranks
        )


def _of_granules(
    layer: LayerDescription, matrix: SharedMatrix, ranks: int, stored: int
) -> Iterator[Alternative]:
    """Shares of whole granules: as few as will do, or as many for all once zeros are added."""
    dim = matrix.split or "N"
    size, block = layer.sizes.get(dim, 1) // matrix.blocks, granule(layer, dim)
    if not block:
        return
    share = -(-size // (ranks * block)) * block
    more = stored * share // size - stored // ranks
    what = "outputs" if dim == "N" else "inputs"
    last = size - share * (ranks - 1)
    if last > 0 and last != share:
        text = f"{share} {what} for each rank but the last, which has {last}: whole blocks of {block}"
        yield Alternative("uneven", text, more)
    padded = share * ranks
    if padded > size:
        text = f"{dim} = {padded}, {padded - size} {what} of zeros, {share} for each rank"
        yield Alternative("padded", text, more)


Question = tuple[int, Hashable]  # which layers, and how they are shared


@dataclass(frozen=True)
class _Known:
    """The answers for each number of ranks, and the prefix of the layer that they were first given for."""

    prefix: str
    shares: dict[int, LayerShare]

    @cached_property
    def fits(self) -> bool:
        """Whether no answer names a tensor."""
        return all(share.error is None for share in self.shares.values())


class Answers:
    """What becomes of layers; `weights` are asked for what a group's cuts need, and no codes are read.

    `kernel`: whose layout has to say each share; None: that is not asked.
    """

    def __init__(self, weights: Weights, kernel: str | None = None) -> None:
        self.weights, self.kernel = weights, kernel
        self._known: dict[Question, _Known] = {}
        self._kept: list[object] = []  # so that no two layers have one id

    def of(
        self, prefix: str, layer: LayerDescription | QloadError | None, how: Sharing, worlds: Sequence[int]
    ) -> PlannedLayer:
        """The layer under `prefix` among each of some numbers of ranks; None: it is not stored."""
        if layer is None:
            layer = self._missing(prefix)
        if isinstance(layer, QloadError):
            refused = LayerShare(error=layer)
            return PlannedLayer(prefix, None, (), how.cut, dict.fromkeys(worlds, refused))
        shape = (layer.N, layer.K) if "K" in layer.sizes else (layer.N,)
        shares = self._shares(layer, how, worlds)
        return PlannedLayer(prefix, layer.format.weight_type.format, shape, how.cut, shares)

    def lawful(
        self,
        layers: Mapping[str, LayerDescription | QloadError],
        sharings: Mapping[str, Sharing],
        runs: int | None,
    ) -> LawfulRanks | None:
        """Numbers of ranks that suit every layer; multiples of `runs`, of ranks that share out experts."""
        numbers = [ranks for ranks in CANDIDATES if ranks % (runs or 1) == 0]
        answers = Answers(self.weights, self.kernel)
        planned = [answers.of(prefix, layers.get(prefix), how, numbers) for prefix, how in sharings.items()]
        return lawful_ranks(
            {
                layer.prefix: [ranks for ranks, share in layer.shares.items() if share.fits]
                for layer in planned
            }
        )

    def _missing(self, prefix: str) -> LayerDescription | QloadError:
        try:
            return self.weights.loader.describe(self.weights, prefix)
        except QloadError as error:
            return error

    def _shares(self, layer: LayerDescription, how: Sharing, worlds: Sequence[int]) -> dict[int, LayerShare]:
        question = id(layer.cuts), how.question
        known = self._known.get(question)
        if known is None:
            self._kept.append(layer.cuts)
            shares = {ranks: self._asked(layer, how, ranks) for ranks in worlds}
            known = self._known[question] = _Known(layer.prefix, shares)
        if known.fits or known.prefix == layer.prefix:
            return known.shares
        return {ranks: _renamed(share, known.prefix, layer.prefix) for ranks, share in known.shares.items()}

    def _asked(self, layer: LayerDescription, how: Sharing, ranks: int) -> LayerShare:
        try:
            held = bytes_held(self.weights, layer, how, ranks)
            if self.kernel is None or layer.format.weight_type.plain:
                return LayerShare(held)
            refusal = first_share(self.weights, layer, how, ranks).why_not(self.kernel)
            return LayerShare(held, kernel="" if refusal is None else f"{self.kernel}: {refusal}")
        except (CutError, DivideError) as error:
            whole = Sharing(SharedMatrix(layer.prefix, None))
            (stored,) = bytes_held(self.weights, layer, whole, 1)
            return LayerShare((), error, alternatives(layer, how.matrix, error, ranks, stored))
        except QloadError as error:  # such as scales of another number of parts than is loaded
            return LayerShare(error=error)


def _renamed(share: LayerShare, known: str, prefix: str) -> LayerShare:
    """The answer for a layer that is alike: an error names its own tensor."""
    error = share.error
    if not isinstance(error, CutError | DivideError) or not error.tensor.startswith(known):
        return share  # it fits, or is about the experts of a layer, or the ranks
    return replace(share, error=replace(error, tensor=prefix + error.tensor[len(known) :]))
