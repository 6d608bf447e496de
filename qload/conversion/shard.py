"""`shard`: write one checkpoint folder per rank and verify it against the load of each rank."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path

from torch import Tensor

from qload.conversion.new_checkpoint import (
    SHARD_SIZE,
    NewCheckpoint,
    copied_files,
    dumped,
    format_of,
    nonfinite_layers,
    nothing,
    of_checkpoint,
    source_folder,
    target_of,
    why_unreadable,
)
from qload.conversion.output_files import INDEX, OutputFile, Progress, index_of, shards_of
from qload.conversion.output_tensors import (
    STACKED,
    Item,
    as_stored,
    copied,
    of_tensors,
    stored_bytes,
    stored_tensors,
)
from qload.conversion.report import ShardedCheckpoint, ShardedLayer
from qload.detect.files import CONFIGS
from qload.diff.comparison import same_weight
from qload.errors import QloadError, checked
from qload.loader import LayerDescription, Part, Split
from qload.loader.finite_scales import Nonfinite, check_nonfinite
from qload.methods.biases import check_bias, read_bias
from qload.parallel import ProcessGroup
from qload.plan.layer_shares import Answers
from qload.plan.sharing import Sharing, check_ranks, described_model, sharings
from qload.repacking.header_only import HeaderOnlySource
from qload.spec import Weight, named
from qload.storage import MemoryStorage
from qload.verify.checkpoint import Checkpoint
from qload.verify.workers import ByteProgress, Workers
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


WHOLE = "tensors of no layer but biases are whole in each folder"
BIASES = "a bias of a layer that is cut along its inputs is in the first rank's folder alone, which adds it"
CONFIGS_OF_ALL = "config.json describes the whole model, as each rank's program reads it"


@dataclass(frozen=True)
class PlannedShares:
    """Shares before they are written.

    `how`: of each layer, by prefix, as all here; `shares`: for each rank those that are cut; `refused`: why.
    """

    how: Mapping[str, Sharing]
    shares: Sequence[Mapping[str, RankShare]]
    items: Sequence[Sequence[Item]]
    refused: Mapping[str, str]
    notes: Sequence[str]


def planned_shares(
    subject: Checkpoint, ranks: int, runs: int | None, tell: ByteProgress, nonfinite: Nonfinite = "error"
) -> PlannedShares:
    """Every layer asked for every rank, in the words of `plan`; ArgumentError for `runs` without experts."""
    weights = subject.weights
    assert weights is not None
    model, why = described_model(subject.model_config)
    how = sharings(subject.groups, model, runs)
    refused = _refused_shares(subject, how, ranks)
    refused |= nonfinite_layers(subject) if nonfinite == "error" else {}
    if refused:
        lawful = Answers(weights).lawful(subject.layers, how, runs)
        return PlannedShares(how, (), (), refused, () if lawful is None else [lawful.text()])
    asked = [(rank, prefix) for rank in range(ranks) for prefix in how if how[prefix].cut != "whole"]

    def share_of(at: int) -> tuple[RankShare | None, str | None]:
        rank, prefix = asked[at]
        layer = subject.layers[prefix]
        assert isinstance(layer, LayerDescription)
        share = RankShare.of(weights, layer, how[prefix], rank, ranks)
        return share, share.why_not() if share else None

    found = Workers.of(None).run(share_of, [1] * len(asked), tell)
    refused = {prefix: why for (_, prefix), (_, why) in zip(asked, found, strict=True) if why}
    if refused:
        return PlannedShares(how, (), (), refused, ())
    shares: list[dict[str, RankShare | None]] = [{} for _ in range(ranks)]
    for (rank, prefix), (share, _) in zip(asked, found, strict=True):
        shares[rank][prefix] = share
    items = [list(_items(subject, mine)) for mine in shares]
    held = [{prefix: share for prefix, share in mine.items() if share} for mine in shares]
    return PlannedShares(how, held, items, {}, list(_notes(subject, how, why)))


def _refused_shares(subject: Checkpoint, how: Mapping[str, Sharing], ranks: int) -> dict[str, str]:
    """What ranks cannot share, in the words of a load; and what is no tensor by itself."""
    assert subject.weights is not None
    answers, found = Answers(subject.weights), {}
    raw = as_stored(subject).keys()
    for prefix, sharing in how.items():
        layer = subject.layers.get(prefix)
        share = answers.of(prefix, layer, sharing, [ranks]).shares[ranks]
        if not share.fits:
            found[prefix] = share.reason
        elif isinstance(layer, LayerDescription):
            stacked = [name for spec in layer.specs if (name := layer.names.full(spec.name)) not in raw]
            if stacked:
                found[prefix] = f"{stacked[0]} {STACKED}"
    return found


def _items(subject: Checkpoint, mine: Mapping[str, RankShare | None]) -> Iterator[Item]:
    """All that stands in the files of one rank, in the order of the source."""
    raw, holders = as_stored(subject), {}
    for prefix in mine:
        layer = subject.layers[prefix]
        assert isinstance(layer, LayerDescription)
        names = [layer.names.full(spec.name) for spec in layer.specs]
        holders.update(dict.fromkeys([*names, named(prefix, "bias")], prefix))
    begun: set[str] = set()
    for name in list(raw.keys()):
        holder = holders.get(name)
        if holder is None:
            yield copied(raw, name)
        elif holder not in begun:
            begun.add(holder)
            share = mine[holder]
            if share is not None:
                yield share.item()


def _notes(subject: Checkpoint, how: Mapping[str, Sharing], why: str) -> Iterator[str]:
    yield CONFIGS_OF_ALL
    yield WHOLE
    if any(each.cut == "K" and named(prefix, "bias") in subject.names for prefix, each in how.items()):
        yield BIASES
    if why:
        yield why


@checked
def shard(
    path: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    tp: int,
    ep: int | None = None,
    shard_size: int = SHARD_SIZE,
    nonfinite: Nonfinite = "error",
    progress: Progress | None = None,
    process_group: ProcessGroup | None = None,
) -> ShardedCheckpoint:
    """Write what each of `tp` ranks would load into a folder of its own, under the names that it has.

    Layers are cut as `plan` says, and one that cannot be refuses all in its words, before a byte is written.
    Each folder is then opened by itself, and each layer in it compared with what its rank loads of the whole.
    Only then has the folder its name; a run that was interrupted goes on where it was, file by file.
    UnreadTensorsError where a tensor is in a form that no format reads.

    Parameters
    ----------
    path
        Safetensors files, a directory, or a sharded index.
    folder
        Which is made, with `rank-0`, `rank-1` and so on in it; ArgumentError where it has anything in it, or
        the disk too little space.
    tp
        The number of ranks.
    ep
        Into how many runs of ranks the experts of a layer are shared out, whole ones; the ranks of a run cut
        them. None: all ranks cut all experts.
    shard_size
        Of how many bytes a file is at most, but for one of a larger layer.
    nonfinite
        "error": a layer with a scale that is NaN or infinite is refused. "allow": such scales are taken as
        they are stored.
    progress
        ByteProgress a stage, the bytes of it that are done, and all.
    process_group
        A group of torch.distributed whose processes all call this and see the same files; they share the
        work, and get the same answer.

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
    target, tell = target_of(folder, shard_size), progress or nothing
    crew = Workers.of(process_group)

    def make(subject: Checkpoint) -> ShardedCheckpoint:
        told = partial(tell, "asking layers")
        plan = planned_shares(subject, tp, ep, told, nonfinite)
        asked = ShardedCheckpoint(subject.path, tp=tp, ep=ep)
        if plan.refused:
            return replace(asked, layers=_refused(subject, plan), notes=plan.notes)
        return _written(asked, subject, plan, target, shard_size, tell, crew)

    return of_checkpoint(path, make, partial(ShardedCheckpoint, tp=tp, ep=ep))


def _refused(subject: Checkpoint, plan: PlannedShares) -> list[ShardedLayer]:
    return [
        ShardedLayer(prefix, format_of(subject.layers.get(prefix)), plan.how[prefix].cut, "refused", reason)
        for prefix, reason in sorted(plan.refused.items())
    ]


def _written(
    asked: ShardedCheckpoint,
    subject: Checkpoint,
    plan: PlannedShares,
    target: Path,
    size: int,
    tell: Progress,
    crew: Workers,
) -> ShardedCheckpoint:
    ranks = [shards_of(items, size) for items in plan.items]
    files = [
        OutputFile(f"rank-{rank}/{file.name}", file.items) for rank, mine in enumerate(ranks) for file in mine
    ]
    said = {"tp": asked.tp, "ep": asked.ep}
    new = NewCheckpoint(subject, target, said, files, dict(_beside(subject, ranks)), crew=crew)

    def prove(folder: Path) -> ShardedCheckpoint:
        return replace(asked, layers=_proven(subject, plan, folder, tell, crew), notes=plan.notes)

    return new.write(prove, tell)


def _beside(subject: Checkpoint, ranks: Sequence[Sequence[OutputFile]]) -> Mapping[str, bytes]:
    """The index and what else stands beside the tensors, for each rank: configs as they are, tokenizers."""
    source = source_folder(subject)
    same = {file.name: file.read_bytes() for file in copied_files(source)}
    same |= {name: (source / name).read_bytes() for name in CONFIGS if (source / name).is_file()}
    found: dict[str, bytes] = {}
    for rank, files in enumerate(ranks):
        index = index_of(files)
        own = same if index is None else {**same, INDEX: dumped(index)}
        found |= {f"rank-{rank}/{name}": content for name, content in own.items()}
    return found


def _proven(
    subject: Checkpoint, plan: PlannedShares, folder: Path, tell: Progress, crew: Workers
) -> list[ShardedLayer]:
    """Each layer of each folder beside what its rank loads."""
    wrong: dict[str, str] = {}
    for rank, shares in enumerate(plan.shares):
        wrong |= _differing(folder / f"rank-{rank}", rank, shares, tell, crew)
    return [
        ShardedLayer(
            prefix,
            format_of(subject.layers.get(prefix)),
            how.cut,
            "differs" if prefix in wrong else "bits",
            wrong.get(prefix, ""),
        )
        for prefix, how in sorted(plan.how.items())
    ]


def _differing(
    folder: Path, rank: int, shares: Mapping[str, RankShare], tell: Progress, crew: Workers
) -> dict[str, str]:
    """What a rank's folder says otherwise, or does not say."""
    with closing(Checkpoint.open(folder)) as made:
        wrong = why_unreadable(made)
        if wrong:
            return dict.fromkeys(shares, f"rank {rank}: {wrong}")
        each = list(shares)

        def compared(at: int) -> str | None:
            prefix = each[at]
            weights = made.weights
            assert weights is not None
            try:
                there = made.loader.load(weights, [Part(prefix)], None)
            except QloadError as error:
                return str(error)
            return None if same_weight(shares[prefix].load(), there) else "it is another weight"

        sizes = [shares[prefix].layer.N * shares[prefix].layer.K for prefix in each]
        told = crew.run(compared, sizes, lambda done, total: tell(f"comparing rank {rank}", done, total), 2)
        return {prefix: f"rank {rank}: {why}" for prefix, why in zip(each, told, strict=True) if why}
