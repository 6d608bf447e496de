"""`shard`: what each rank of a group would load of a checkpoint, as files, proven to be that."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path

from qload.conversion.beside import copied_files, dumped
from qload.conversion.rank_share import RankShare
from qload.conversion.shard_plan import PlannedShares, planned_shares
from qload.conversion.shard_report import ShardedCheckpoint, ShardedLayer
from qload.conversion.shards import INDEX, OutputFile, index_of, shards_of
from qload.conversion.source import format_of, source_folder, why_unreadable
from qload.conversion.write import Progress
from qload.conversion.written import SHARD_SIZE, NewCheckpoint, nothing, of_checkpoint, target_of
from qload.detect.files import CONFIGS
from qload.diff.comparison import same_weight
from qload.errors import QloadError, checked
from qload.loader import Part
from qload.loader.finite_scales import Nonfinite, check_nonfinite
from qload.parallel import ProcessGroup
from qload.plan.sharing import check_ranks
from qload.verify.crew import Crew
from qload.verify.subject import Subject


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
        Told a stage, the bytes of it that are done, and all.
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
    crew = Crew.of(process_group)

    def make(subject: Subject) -> ShardedCheckpoint:
        told = partial(tell, "asking layers")
        plan = planned_shares(subject, tp, ep, told, nonfinite)
        asked = ShardedCheckpoint(subject.path, tp=tp, ep=ep)
        if plan.refused:
            return replace(asked, layers=_refused(subject, plan), notes=plan.notes)
        return _written(asked, subject, plan, target, shard_size, tell, crew)

    return of_checkpoint(path, make, partial(ShardedCheckpoint, tp=tp, ep=ep))


def _refused(subject: Subject, plan: PlannedShares) -> list[ShardedLayer]:
    return [
        ShardedLayer(prefix, format_of(subject.layers.get(prefix)), plan.how[prefix].cut, "refused", reason)
        for prefix, reason in sorted(plan.refused.items())
    ]


def _written(
    asked: ShardedCheckpoint,
    subject: Subject,
    plan: PlannedShares,
    target: Path,
    size: int,
    tell: Progress,
    crew: Crew,
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


def _beside(subject: Subject, ranks: Sequence[Sequence[OutputFile]]) -> Mapping[str, bytes]:
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
    subject: Subject, plan: PlannedShares, folder: Path, tell: Progress, crew: Crew
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
    folder: Path, rank: int, shares: Mapping[str, RankShare], tell: Progress, crew: Crew
) -> dict[str, str]:
    """What a rank's folder says otherwise, or does not say."""
    with closing(Subject.open(folder)) as made:
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
        told = crew.share_out(
            compared, sizes, lambda done, total: tell(f"comparing rank {rank}", done, total), 2
        )
        return {prefix: f"rank {rank}: {why}" for prefix, why in zip(each, told, strict=True) if why}
