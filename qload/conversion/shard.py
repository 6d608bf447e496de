"""`shard`: write one checkpoint folder per rank and verify it against the load of each rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Literal

from torch import Tensor

from qload.conversion.new_checkpoint import (
    SHARD_SIZE_BYTES,
    NewCheckpoint,
    copied_files,
    format_of,
    json_bytes,
    no_progress,
    nonfinite_layers,
    output_path,
    report_on,
    source_folder,
    unreadable_reason,
)
from qload.conversion.output_files import (
    INDEX,
    STACKED,
    OutputFile,
    OutputItem,
    Progress,
    item_from_tensors,
    items_in_source_order,
    layer_bytes,
    load_layer,
    safetensors_index,
    split_into_files,
    stored_tensors,
    weight_tensors,
)
from qload.conversion.report import ShardedCheckpoint, ShardedLayer
from qload.detect.config_reader import CONFIGS
from qload.detect.loaders import is_comfy
from qload.detect.torchao_header import has_header
from qload.diff.comparison import same_weight
from qload.errors import QloadError, checked
from qload.formats import GGUFWeight
from qload.loader import LayerDescription
from qload.loader.layer_values import check_nonfinite
from qload.loader.source import Nonfinite
from qload.methods.checkpoint_linear import check_bias_tensor, read_bias
from qload.parallel import ProcessGroup
from qload.plan.plan import SharePlanner
from qload.plan.sharing import RankShare, Sharing, check_ranks, sharings, supported_text_config
from qload.spec import Weight, named
from qload.storage import MemoryStorage
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.workers import ByteProgress, Workers
from qload.weights import Weights

WHOLE_TENSORS_NOTE = "tensors outside of layers, except biases, are whole in each folder"
BIASES_NOTE = "the bias of a layer cut along its inputs is in the folder of rank 0 alone, which adds it"
SHARED_MATRICES = "and other layers share the matrix; each rank loads its share from the whole checkpoint"
COMFY_REASON = "no config describes the marks of ComfyUI; each rank loads its share from the file"
GGUF_REASON = "no program reads blocks of GGUF in safetensors; each rank loads its share from the GGUF file"
TORCHAO_REASON = (
    "the header of a file states its class, and only torchao writes such headers; each rank loads its share "
    "from the whole checkpoint"
)
CONFIG_NOTE = "config.json describes the whole model, as the program of each rank expects"


def outline(share: RankShare) -> dict[str, Tensor]:
    """Return the stored tensors of a share by name, with placeholders for the codes."""
    return _with_bias(share, share.load_header())


def _with_bias(share: RankShare, weight: Weight) -> dict[str, Tensor]:
    """Return the tensors of a share, and its bias; of a cut along the inputs, rank 0 has the bias."""
    tensors, prefix = weight_tensors(weight), share.layer.prefix
    if check_bias_tensor(share.weights, prefix, share.layer.N):
        bias = read_bias(share.weights, share.parts, weight, share.split)
        if bias is not None:
            tensors[named(prefix, "bias")] = bias
    return tensors


def why_not_alone(share: RankShare) -> str | None:
    """Return why a loader would refuse the share alone as a layer, or None."""
    layer, loader = share.layer, share.weights.loader
    try:
        loader.shape(Weights(MemoryStorage(outline(share)), loader=loader), layer.prefix)
    except QloadError as error:
        return f"its share alone is not a valid {layer.format.weight_type.format} layer: {error}"
    return None


def share_item(share: RankShare) -> OutputItem:
    """Return the item with the tensors of a share."""
    header, source_bytes = outline(share), layer_bytes(share.weights, share.layer)
    return item_from_tensors(header, source_bytes, lambda: _with_bias(share, share.load()), copied=True)


@dataclass(frozen=True)
class ShardingLayout:
    """Output of `shard`, before any byte is written.

    Attributes
    ----------
    sharings
        Sharing of each layer by prefix.
    shares
        For each rank, its shares of the layers that are cut, by prefix.
    items
        For each rank, the items to write.
    refused
        Reasons of refusals by prefix.
    """

    sharings: Mapping[str, Sharing]
    shares: Sequence[Mapping[str, RankShare]]
    items: Sequence[Sequence[OutputItem]]
    refused: Mapping[str, str]
    notes: Sequence[str]


@checked
def shard(
    path: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    tp: int,
    ep: int | None = None,
    shard_size: int = SHARD_SIZE_BYTES,
    nonfinite: Nonfinite = "error",
    progress: Progress | None = None,
    process_group: ProcessGroup | None = None,
) -> ShardedCheckpoint:
    """Write the share of each of `tp` ranks into a folder of its own, under the stored names.

    Layers are cut as in `plan`. If a layer cannot be cut, nothing is written, and the reason is that of
    `plan`. Each folder is then opened alone, and every layer in it compared with the load of its rank from
    the source. Only after that the output folder gets its name. An interrupted run resumes at the first
    missing file. UnreadTensorsError for a tensor that no format reads.

    Parameters
    ----------
    path
        Safetensors files, a directory, or a sharded index.
    folder
        The output folder, with `rank-0`, `rank-1` and so on; ArgumentError if it has contents, or if the disk
        has too little space.
    tp
        Number of ranks.
    ep
        Number of groups of ranks over which whole experts are distributed; the ranks of a group cut them.
        None: every expert is cut among all ranks.
    shard_size
        Maximum size of an output file in bytes; a larger layer has its own file.
    nonfinite
        "error": a layer with a scale that is NaN or infinite is refused. "allow": such scales are written as
        stored.
    progress
        Receives the stage, the finished bytes of the stage, and its total.
    process_group
        A group of torch.distributed. All its processes call `shard` with the same arguments, see the same
        files, share the work, and return the same report.

    Examples
    --------
    >>> import os, tempfile
    >>> from qload import open_checkpoint, shard
    >>> from qload.testing import make_checkpoint
    >>> folder = tempfile.TemporaryDirectory()
    >>> one, other = os.path.join(folder.name, "gptq"), os.path.join(folder.name, "ranks")
    >>> stored = make_checkpoint("gptq", one)
    >>> found = shard(one, other, tp=2)
    >>> found.verdict, set(found.counts), sorted(os.listdir(other))
    ('ok', {'bits'}, ['qload-certificate.json', 'rank-0', 'rank-1'])
    >>> name = "model.layers.0.mlp.up_proj"
    >>> with open_checkpoint(one) as whole, open_checkpoint(os.path.join(other, "rank-1")) as mine:
    ...     whole.get_weights(name).shape, mine.get_weights(name).shape
    ((256, 128), (128, 128))
    >>> folder.cleanup()
    """
    check_ranks(tp, ep)
    check_nonfinite(nonfinite)
    target, report_progress = output_path(folder, shard_size), progress or no_progress
    workers = Workers.of(process_group)

    def shard_source(source: VerifiedCheckpoint) -> ShardedCheckpoint:
        layout = plan_shares(source, tp, ep, partial(report_progress, "checking layers"), nonfinite)
        report = ShardedCheckpoint(source.path, tp=tp, ep=ep, notes=layout.notes)

        def result(prefix: str, outcome: Literal["bits", "differs", "refused"], detail: str) -> ShardedLayer:
            stored_format = format_of(source.layers.get(prefix))
            return ShardedLayer(prefix, stored_format, layout.sharings[prefix].cut, outcome, detail)

        if layout.refused:
            refused = sorted(layout.refused.items())
            return replace(report, layers=[result(prefix, "refused", reason) for prefix, reason in refused])
        by_rank = [split_into_files(items, shard_size) for items in layout.items]
        files = [
            OutputFile(f"rank-{rank}/{file.name}", file.items)
            for rank, of_rank in enumerate(by_rank)
            for file in of_rank
        ]
        request = {"tp": tp, "ep": ep}
        new = NewCheckpoint(source, target, request, files, _side_files(source, by_rank), (), (), workers)

        def verify(folder: Path) -> ShardedCheckpoint:
            reasons: dict[str, str] = {}
            for rank, shares in enumerate(layout.shares):
                reasons |= _differing_layers(folder / f"rank-{rank}", rank, shares, report_progress, workers)
            layers = [
                result(prefix, "differs" if prefix in reasons else "bits", reasons.get(prefix, ""))
                for prefix in sorted(layout.sharings)
            ]
            return replace(report, layers=layers)

        return new.write(verify, report_progress)

    return report_on(path, shard_source, partial(ShardedCheckpoint, tp=tp, ep=ep))


def plan_shares(
    source: VerifiedCheckpoint,
    tp: int,
    ep: int | None,
    progress: ByteProgress,
    nonfinite: Nonfinite,
) -> ShardingLayout:
    """Cut every layer for every rank; ArgumentError for `ep` if the model has no experts.

    Refusals have the reasons of `plan`.
    """
    weights = source.weights
    model, note = supported_text_config(source.model_config)
    how = sharings(source.index, model, ep)
    refused = _refused_layers(source, how, tp)
    spoiled, allowed = nonfinite_layers(source, nonfinite)
    refused |= spoiled
    if refused:
        lawful = SharePlanner(weights).lawful(source.layers, how, ep)
        notes = [] if lawful is None or tp in lawful.ranks else [lawful.text()]
        return ShardingLayout(how, (), (), refused, notes)
    pairs = [(rank, prefix) for rank in range(tp) for prefix in how if how[prefix].cut != "whole"]

    def cut(n: int) -> tuple[RankShare | None, str | None]:
        rank, prefix = pairs[n]
        layer = source.layers[prefix]
        assert isinstance(layer, LayerDescription)
        group = how[prefix].group(rank, tp)
        if group is None:
            return None, None
        share = RankShare.of(weights, layer, how[prefix], group)
        return share, why_not_alone(share)

    results = Workers.of(None).run(cut, [1] * len(pairs), progress)
    refused = {prefix: reason for (_, prefix), (_, reason) in zip(pairs, results, strict=True) if reason}
    if refused:
        return ShardingLayout(how, (), (), refused, ())
    shares: list[dict[str, RankShare | None]] = [{} for _ in range(tp)]
    for (rank, prefix), (share, _) in zip(pairs, results, strict=True):
        shares[rank][prefix] = share
    items = [list(_rank_items(source, of_rank)) for of_rank in shares]
    cut_shares = [{prefix: share for prefix, share in of_rank.items() if share} for of_rank in shares]
    biased = any(how[prefix].cut == "K" and named(prefix, "bias") in source.names for prefix in how)
    notes = [CONFIG_NOTE, WHOLE_TENSORS_NOTE, *([BIASES_NOTE] if biased else []), *([note] if note else [])]
    notes += allowed
    return ShardingLayout(how, cut_shares, items, {}, notes)


def _refused_layers(source: VerifiedCheckpoint, how: Mapping[str, Sharing], tp: int) -> dict[str, str]:
    """Return the reason, by prefix, of layers that ranks cannot share, and of layers in shared tensors."""
    planner, reasons = SharePlanner(source.weights), {}
    stored, in_headers = stored_tensors(source).keys(), has_header(source.storage)
    for prefix, sharing in how.items():
        layer = source.layers.get(prefix)
        share = planner.of(prefix, layer, sharing, [tp]).shares[tp]
        if not share.fits:
            reasons[prefix] = share.reason
        elif isinstance(layer, LayerDescription) and layer.format.weight_type is GGUFWeight:
            reasons[prefix] = GGUF_REASON
        elif isinstance(layer, LayerDescription) and is_comfy(source.storage):
            reasons[prefix] = COMFY_REASON
        elif isinstance(layer, LayerDescription) and not layer.format.weight_type.plain and in_headers:
            reasons[prefix] = TORCHAO_REASON
        elif isinstance(layer, LayerDescription) and layer.transforms is not None:
            reasons[prefix] = f"it transforms its {layer.transforms}, {SHARED_MATRICES}"
        elif isinstance(layer, LayerDescription):
            stacked = [name for name in _tensor_names(layer) if name not in stored]
            if stacked:
                reasons[prefix] = f"{stacked[0]} {STACKED}"
    return reasons


def _tensor_names(layer: LayerDescription) -> list[str]:
    return [layer.names.full(spec.name) for spec in layer.specs]


def _rank_items(source: VerifiedCheckpoint, shares: Mapping[str, RankShare | None]) -> Iterator[OutputItem]:
    """Yield all items of one rank in the order of the source."""
    owners: dict[str, str] = {}
    for prefix in shares:
        layer = source.layers[prefix]
        assert isinstance(layer, LayerDescription)
        owners.update(dict.fromkeys([*_tensor_names(layer), named(prefix, "bias")], prefix))
    items = {prefix: share_item(share) if share else None for prefix, share in shares.items()}
    return items_in_source_order(stored_tensors(source), owners, items)


def _side_files(source: VerifiedCheckpoint, by_rank: Sequence[Sequence[OutputFile]]) -> dict[str, bytes]:
    """Return the unchanged configs, the tokenizer and the index of each rank, by path."""
    folder = source_folder(source)
    copies = {file.name: file.read_bytes() for file in copied_files(folder)}
    copies |= {name: (folder / name).read_bytes() for name in CONFIGS if (folder / name).is_file()}
    contents: dict[str, bytes] = {}
    for rank, files in enumerate(by_rank):
        index = safetensors_index(files)
        contents_of_rank = copies if index is None else {**copies, INDEX: json_bytes(index)}
        contents |= {f"rank-{rank}/{name}": content for name, content in contents_of_rank.items()}
    return contents


def _differing_layers(
    folder: Path, rank: int, shares: Mapping[str, RankShare], progress: Progress, workers: Workers
) -> dict[str, str]:
    """Return the reason, by prefix, of layers in the folder of a rank that differ from its load."""
    with VerifiedCheckpoint.open(folder, collect=True) as output:
        reason = unreadable_reason(output)
        if reason is not None:
            return dict.fromkeys(shares, f"rank {rank}: {', '.join(reason.values())}")
        prefixes = list(shares)

        def compare(n: int) -> str | None:
            try:
                written = load_layer(output, prefixes[n])
            except QloadError as error:
                return str(error)
            return None if same_weight(shares[prefixes[n]].load(), written) else "the weights differ"

        sizes = [shares[prefix].layer.N * shares[prefix].layer.K for prefix in prefixes]
        stage = f"comparing rank {rank}"
        results = workers.run(compare, sizes, partial(progress, stage), 2)
        return {prefix: f"rank {rank}: {why}" for prefix, why in zip(prefixes, results, strict=True) if why}
