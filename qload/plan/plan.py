"""`plan`: possible numbers of ranks of a checkpoint, from headers and facts alone."""

from collections.abc import Sequence
from os import PathLike
from typing import Literal

from qload.checkpoint import LayerIndex, account, opened
from qload.errors import checked
from qload.plan.layer_shares import SharePlanner
from qload.plan.report import PlannedLayer, ShardingPlan, WorldPlan
from qload.plan.sharing import check_ranks, sharings, supported_text_config
from qload.weights import Weights

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
        groups, planner = LayerIndex(weights), SharePlanner(weights, target)
        accounted = account(groups)
        shared = {
            prefix: sharing
            for prefix, sharing in sharings(groups, config, ep).items()
            if not accounted.hides(prefix)
        }
        layers = [
            planner.of(prefix, groups.layers.get(prefix), how, worlds) for prefix, how in shared.items()
        ]
        info = weights.storage.info
        other_bytes = sum(info(name).nbytes for name in accounted.report.used if name not in groups.specs)
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
            lawful=None if all_fit else planner.lawful(groups.layers, shared, ep),
        )


def _world_plan(layers: Sequence[PlannedLayer], ranks: int, other_bytes: int) -> WorldPlan:
    """Sum up the layers, in load order, for one number of ranks; `other_bytes` lie on each rank."""
    shares = [layer.shares[ranks] for layer in layers]
    refused = [share for share in shares if not share.fits]
    totals = [sum(share.bytes[rank] for share in shares if share.bytes) for rank in range(ranks)]
    reason = refused[0].reason if refused else ""
    return WorldPlan(not refused, len(refused), reason, tuple(total + other_bytes for total in totals))
