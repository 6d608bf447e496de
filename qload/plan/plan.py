"""`plan`: possible numbers of ranks of a checkpoint, from headers and facts, and alternatives to them."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import Literal

from qload.checkpoint import LayerIndex, account, opened
from qload.errors import CutError, DivideError, QloadError, checked
from qload.loader import LayerDescription
from qload.loader.sharding import granule
from qload.models.stored_layers import SharedMatrix
from qload.plan.rank_counts import CANDIDATES, LawfulRanks, lawful_ranks
from qload.plan.report import Alternative, LayerShare, PlannedLayer, ShardingPlan, WorldPlan
from qload.plan.sharing import (
    Sharing,
    check_ranks,
    first_rank_share,
    rank_bytes,
    sharings,
    supported_text_config,
)
from qload.weights import Weights


def alternatives(
    layer: LayerDescription, matrix: SharedMatrix, error: CutError | DivideError, ranks: int, stored: int
) -> tuple[Alternative, ...]:
    """Return other ways to share a `layer` of `stored` bytes after an `error`, in ascending order of cost."""
    if matrix.heads is not None and isinstance(error, DivideError) and "heads" in str(error.dim):
        options = [*_head_alternatives(matrix, ranks, stored)]
    else:
        options = [*_granule_alternatives(layer, matrix, ranks, stored)]
    more = stored - stored // ranks
    options.append(Alternative("whole", f"all of the layer on each of {ranks} ranks", more))
    return tuple(sorted(options, key=lambda option: option.bytes))


def _head_alternatives(matrix: SharedMatrix, ranks: int, stored: int) -> Iterator[Alternative]:
    """Yield query heads padded with zeros, or key and value heads copied to every rank."""
    queries, keys = (matrix.heads.queries, matrix.heads.keys) if matrix.heads else (None, None)
    total = queries + 2 * (keys or 0) if queries else keys or 0
    head_bytes = stored // total if total else 0
    if queries and queries % ranks:
        padded = -(-queries // ranks) * ranks
        text = f"{padded} query heads, {padded - queries} of them zero, {padded // ranks} for each rank"
        copied = 2 * keys * head_bytes if keys else 0
        yield Alternative("padded", text, padded // ranks * head_bytes + copied - stored // ranks)
    elif keys:
        per_rank = (2 * keys + queries // ranks if queries else keys) * head_bytes
        text = f"all {keys} key/value heads on each of {ranks} ranks"
        yield Alternative("copied", text, per_rank - stored // ranks)


def _granule_alternatives(
    layer: LayerDescription, matrix: SharedMatrix, ranks: int, stored: int
) -> Iterator[Alternative]:
    """Yield shares of whole granules, with a smaller last share or padded with zeros to equal shares."""
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


@dataclass(frozen=True)
class _CachedShares:
    """Results by number of ranks, and the prefix of the layer behind them."""

    prefix: str
    shares: dict[int, LayerShare]

    @cached_property
    def fits(self) -> bool:
        """Return whether no result has an error, which would name a tensor."""
        return all(share.error is None for share in self.shares.values())


class SharePlanner:
    """Shares of layers for several numbers of ranks, computed once for layers of one description.

    Parameters
    ----------
    weights
        Source of the tensors that cuts depend on; codes are not read.
    kernel
        The kernel format to check each share against; None: no check.
    """

    def __init__(self, weights: Weights, kernel: str | None = None) -> None:
        self.weights, self.kernel = weights, kernel
        self._cache: dict[tuple[int, Hashable], _CachedShares] = {}  # by id(layer.cuts) and the sharing
        self._alive: list[object] = []  # keeps the ids unique

    def of(
        self,
        prefix: str,
        layer: LayerDescription | QloadError | None,
        sharing: Sharing,
        worlds: Sequence[int],
    ) -> PlannedLayer:
        """Return the results for one layer and each number of ranks; a `layer` None is not stored."""
        if layer is None:
            layer = self._missing(prefix)
        if isinstance(layer, QloadError):
            refused = LayerShare(error=layer)
            return PlannedLayer(prefix, None, (), sharing.cut, dict.fromkeys(worlds, refused))
        shape = (layer.N, layer.K) if "K" in layer.sizes else (layer.N,)
        shares = self._shares(layer, sharing, worlds)
        return PlannedLayer(prefix, layer.format.weight_type.format, shape, sharing.cut, shares)

    def lawful(
        self,
        layers: Mapping[str, LayerDescription | QloadError],
        sharings: Mapping[str, Sharing],
        ep: int | None,
    ) -> LawfulRanks | None:
        """Return the numbers of ranks, multiples of `ep`, that suit every layer."""
        numbers = [ranks for ranks in CANDIDATES if ranks % (ep or 1) == 0]
        planner = SharePlanner(self.weights, self.kernel)
        planned = [planner.of(prefix, layers.get(prefix), how, numbers) for prefix, how in sharings.items()]
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

    def _shares(
        self, layer: LayerDescription, sharing: Sharing, worlds: Sequence[int]
    ) -> dict[int, LayerShare]:
        key = id(layer.cuts), sharing.key
        cached = self._cache.get(key)
        if cached is None:
            self._alive.append(layer.cuts)
            shares = {ranks: self._share(layer, sharing, ranks) for ranks in worlds}
            cached = self._cache[key] = _CachedShares(layer.prefix, shares)
        if cached.fits or cached.prefix == layer.prefix:
            return cached.shares
        return {ranks: _rename(share, cached.prefix, layer.prefix) for ranks, share in cached.shares.items()}

    def _share(self, layer: LayerDescription, sharing: Sharing, ranks: int) -> LayerShare:
        try:
            nbytes = rank_bytes(self.weights, layer, sharing, ranks)
            if self.kernel is None or layer.format.weight_type.plain:
                return LayerShare(nbytes)
            refusal = first_rank_share(self.weights, layer, sharing, ranks).why_not_layout(self.kernel)
            return LayerShare(nbytes, kernel="" if refusal is None else f"{self.kernel}: {refusal}")
        except (CutError, DivideError) as error:
            unshared = Sharing(SharedMatrix(layer.prefix, None))
            (stored,) = rank_bytes(self.weights, layer, unshared, 1)
            return LayerShare((), error, alternatives(layer, sharing.matrix, error, ranks, stored))
        except QloadError as error:  # such as scales for another number of parts
            return LayerShare(error=error)


def _rename(share: LayerShare, cached_prefix: str, prefix: str) -> LayerShare:
    """Return a cached share with an error that names the tensor of another layer."""
    error = share.error
    if not isinstance(error, CutError | DivideError) or not error.tensor.startswith(cached_prefix):
        return share  # no error, or one about experts or ranks
    return replace(share, error=replace(error, tensor=prefix + error.tensor[len(cached_prefix) :]))


NOT_COUNTED = (
    "bytes are those of stored weights, without the padding of kernel formats, casts to another type, the KV "
    "cache, activations and scratch space"
)


@checked
def plan(
    path_or_weights: str | PathLike[str] | Weights,
    *,
    tp: int | Sequence[int] = (1, 2, 4, 8),
    ep: int | None = None,
    target: Literal["marlin", "strips", "panels", "exllama"] | None = None,
) -> ShardingPlan:
    """Check for several numbers of ranks whether each layer can be shared, with reasons and alternatives.

    Layers of a model that `load_model` supports are cut as it cuts them, and it refuses a layer with the same
    reason. Layers of other models are cut as is usual for their names. No weight is read.

    Parameters
    ----------
    path_or_weights
        A safetensors file, a directory, or a sharded index; or the result of `open_checkpoint`, which stays
        open.
    tp
        Numbers of ranks.
    ep
        Number of groups of ranks over which whole experts are distributed; the ranks of a group cut them.
        None: every expert is cut among all ranks.
    target
        Kernel format that has to hold the share of rank 0 of each quantized layer. The check reads zero
        points and scales of the first of several identical layers. None: no check.

    Raises
    ------
    ArgumentError
        For numbers below 1 or above 65536, and for `ep` of a model that has no experts.
    StorageError, ConfigError, UnsupportedFormatError
        As `open_checkpoint`, if the path cannot be opened.

    Examples
    --------
    >>> import torch
    >>> from qload import MemoryStorage, Weights, loader_from_config, plan
    >>> words, scales = torch.zeros(24, 64, dtype=torch.int32), torch.ones(3, 64).half()
    >>> tensors = {"down_proj.qweight": words, "down_proj.scales": scales,
    ...            "down_proj.qzeros": torch.zeros(3, 8, dtype=torch.int32)}
    >>> config = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    >>> weights = Weights(MemoryStorage(tensors), loader=loader_from_config(config))
    >>> found = plan(weights, tp=(2, 3))
    >>> found.worlds[2].fits, found.worlds[3].fits, found.worlds[3].bytes
    (False, True, (2208, 2208, 2208))
    >>> [each.kind for each in found.layers[0].shares[2].alternatives]
    ['uneven', 'padded', 'whole']
    """
    worlds = check_ranks(tp, ep)
    with opened(path_or_weights) as (weights, model_config):
        config, note = supported_text_config(model_config)
        index, planner = LayerIndex(weights), SharePlanner(weights, target)
        accounted = account(index)
        shared = {
            prefix: sharing
            for prefix, sharing in sharings(index, config, ep).items()
            if not accounted.hides(prefix)
        }
        layers = [planner.of(prefix, index.layers.get(prefix), how, worlds) for prefix, how in shared.items()]
        info = weights.storage.info
        other_bytes = sum(info(name).nbytes for name in accounted.report.used if name not in index.specs)
        results = {ranks: _world_plan(layers, ranks, other_bytes) for ranks in worlds}
        all_fit = all(result.fits for result in results.values())
        notes = [NOT_COUNTED, *([note] if note else [])]
        if other_bytes:
            notes.append(f"{other_bytes} bytes of biases and other tensors are counted whole on every rank")
        return ShardingPlan(
            path="" if isinstance(path_or_weights, Weights) else str(path_or_weights),
            layers=sorted(layers, key=lambda layer: layer.prefix),
            worlds=results,
            model=None if config is None else config.type,
            notes=notes + accounted.notes(),
            unread=dict(accounted.report.unread),
            lawful=None if all_fit else planner.lawful(index.layers, shared, ep),
        )


def _world_plan(layers: Sequence[PlannedLayer], ranks: int, other_bytes: int) -> WorldPlan:
    """Sum up the layers, in load order, for one number of ranks; `other_bytes` lie on each rank."""
    shares = [layer.shares[ranks] for layer in layers]
    refused = [share for share in shares if not share.fits]
    totals = [sum(share.bytes[rank] for share in shares if share.bytes) for rank in range(ranks)]
    reason = refused[0].reason if refused else ""
    return WorldPlan(not refused, len(refused), reason, tuple(total + other_bytes for total in totals))
