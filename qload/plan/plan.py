"""`plan`: among how many ranks a checkpoint can be shared, from headers and facts alone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Literal

from qload.detect import read_model_config
from qload.errors import checked
from qload.listing import Groups, account
from qload.models.config import TextConfig
from qload.plan.layer_shares import Answers
from qload.plan.report import PlannedLayer, ShardingPlan, WorldPlan
from qload.plan.sharing import check_ranks, described_model, sharings
from qload.weights import Weights, open_checkpoint

NOT_COUNTED = (
    "bytes are those of weights as they are stored: what a kernel's order pads, casts to another type, the "
    "cache of keys and values, activations and scratch space are not counted"
)


@checked
def plan(
    path_or_weights: str | PathLike[str] | Weights,
    *,
    tp: int | Sequence[int] = (1, 2, 4, 8),
    ep: int | None = None,
    target: Literal["marlin", "strips", "panels", "exllama"] | None = None,
) -> ShardingPlan:
    """Among how many ranks a checkpoint can be shared: which layers fit, why others do not, and what to do.

    Of a type that `load_model` loads, each layer is cut as that cuts it, and what does not fit is refused by
    `load_model` in the same words; of others as is usual by the names of layers. No weight is read.

    Parameters
    ----------
    path_or_weights
        A safetensors file, a directory, or a sharded index; or what `open_checkpoint` made of one, which
        stays open.
    tp
        Numbers of ranks.
    ep
        Into how many runs of ranks the experts of a layer are shared out, whole ones; the ranks of a run cut
        them. None: all ranks cut all experts.
    target
        The kernel whose layout has to say each quantized layer, as the first rank would have it; zero points
        and scales of the first of alike layers are read for that. None: that is not asked.

    Raises
    ------
    ArgumentError
        For numbers below 1 or above 65536, and for `ep` of a model that has no experts.
    StorageError, ConfigError, UnsupportedFormatError
        As `open_checkpoint`, where the path cannot be opened.

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
        config, why = described_model(model_config)
        path = "" if isinstance(path_or_weights, Weights) else str(path_or_weights)
        notes = [NOT_COUNTED, *([why] if why else [])]
        return _plan(weights, config, worlds, ep, target, path, notes)


@contextmanager
def opened(
    path_or_weights: str | PathLike[str] | Weights,
) -> Iterator[tuple[Weights, Mapping[str, object]]]:
    """The tensors of `path_or_weights` and the entries of their config.json, if there is one."""
    if isinstance(path_or_weights, Weights):
        known = path_or_weights.architecture
        config = {} if known is None else {**known.config, "model_type": known.type}
        yield path_or_weights, config
    else:
        with open_checkpoint(path_or_weights) as weights:
            yield weights, read_model_config(path_or_weights)


def _plan(
    weights: Weights,
    config: TextConfig | None,
    worlds: Sequence[int],
    ep: int | None,
    kernel: str | None,
    path: str,
    notes: list[str],
) -> ShardingPlan:
    groups = Groups(weights)
    answers, known, accounted = Answers(weights, kernel), groups.layers, account(groups)
    shared = {
        prefix: how for prefix, how in sharings(groups, config, ep).items() if not accounted.hides(prefix)
    }
    planned = [answers.of(prefix, known.get(prefix), how, worlds) for prefix, how in shared.items()]
    stored = weights.storage.info
    beside = sum(stored(name).nbytes for name in accounted.report.used if name not in groups.specs)
    if beside:
        notes.append(f"{beside} bytes of biases and tensors of no layer are counted whole on every rank")
    notes += accounted.notes()
    found = {ranks: _world(planned, ranks, beside) for ranks in worlds}
    return ShardingPlan(
        path,
        sorted(planned, key=lambda layer: layer.prefix),
        found,
        None if config is None else config.type,
        notes,
        dict(accounted.report.unread),
        lawful=None if all(each.fits for each in found.values()) else answers.lawful(known, shared, ep),
    )


def _world(layers: Sequence[PlannedLayer], ranks: int, beside: int) -> WorldPlan:
    """All layers, in the order of a load, among so many ranks, each of which holds so many bytes `beside`."""
    shares = [layer.shares[ranks] for layer in layers]
    refused = [share for share in shares if not share.fits]
    held = (sum(share.bytes[rank] for share in shares if share.bytes) for rank in range(ranks))
    first = refused[0].reason if refused else ""
    return WorldPlan(not refused, len(refused), first, tuple(each + beside for each in held))
