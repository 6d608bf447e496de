"""`diff`: two checkpoints, matched by what their layers are, and compared by what these mean."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from os import PathLike

from qload.architecture import Architecture
from qload.architecture.table import spelled
from qload.diff.comparison import layer_diff, tensor_diff
from qload.diff.report import CheckpointDiff, LayerDiff, Outcome, unreadable
from qload.errors import StorageError, UnsupportedFormatError, checked
from qload.loader import LayerDescription
from qload.parallel import ProcessGroup
from qload.verify.checkpoint import Checkpoint
from qload.verify.diagnose_diff import SideBySide
from qload.verify.report import Report
from qload.verify.workers import Workers

Progress = Callable[[str, int, int], None]  # a stage, bytes that are done, bytes of all
THREADS = 4  # each has a run of outputs of both in memory


@checked
def diff(
    path: str | PathLike[str],
    other: str | PathLike[str],
    *,
    progress: Progress | None = None,
    process_group: ProcessGroup | None = None,
) -> CheckpointDiff:
    """Whether two checkpoints mean the same weights, layer by layer.

    Formats, dtypes, shards and the spellings of names that types of models have may differ. Nothing is raised
    for what the files hold; weights are read in runs of outputs, so that files may be larger than memory.

    Parameters
    ----------
    path, other
        Safetensors files, directories, or sharded indices.
    progress
        Told "comparing", the bytes of the first that were compared, and those of all its layers.
    process_group
        A group of torch.distributed whose processes all call this, share the layers, and get the same answer.

    Examples
    --------
    >>> import os, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> from qload import diff
    >>> folder = tempfile.TemporaryDirectory()
    >>> one, other = (os.path.join(folder.name, name) for name in ("a.safetensors", "b.safetensors"))
    >>> save_file({"up.weight": torch.full((4, 2), 1.001)}, one)
    >>> save_file({"up.weight": torch.full((4, 2), 1.001).bfloat16()}, other)
    >>> [(layer.name, layer.outcome) for layer in diff(one, other).layers]
    [('up', 'rounded')]
    >>> folder.cleanup()
    """
    crew = Workers.of(process_group)
    with closing(Checkpoint.open(path)) as ours, closing(Checkpoint.open(other)) as theirs:
        for subject in (ours, theirs):
            if subject.weights is None or subject.errors:
                refused = Report(subject.path, tuple(subject.errors), readable=False)
                return unreadable(ours.path, theirs.path, refused)
        try:
            found = [
                *_layers(ours, theirs, crew, progress or _nothing),
                *_tensors(ours, theirs),
                *_unread(ours, theirs),
            ]
        except StorageError as error:  # a file that fails or is replaced meanwhile
            return CheckpointDiff(ours.path, theirs.path, unreadable=str(error))
        return CheckpointDiff(ours.path, theirs.path, sorted(found, key=lambda layer: layer.name))


def _layers(ours: Checkpoint, theirs: Checkpoint, crew: Workers, progress: Progress) -> Iterator[LayerDiff]:
    here, there = (_by_key(each, _read(each, each.layers)) for each in (ours, theirs))
    both = sorted(here.keys() & there.keys())
    yield from _lonely(ours, {key: here[key] for key in here.keys() - there.keys()}, theirs, True)
    yield from _lonely(theirs, {key: there[key] for key in there.keys() - here.keys()}, ours, False)
    others = {layer.prefix: layer for layer in theirs.described()}

    def compared(at: int) -> LayerDiff:
        one, two = ours.layers[here[both[at]]], theirs.layers[there[both[at]]]
        if isinstance(one, LayerDescription) and isinstance(two, LayerDescription):
            return layer_diff(SideBySide(ours, one, theirs, two), others)
        damaged, error = (theirs, two) if isinstance(one, LayerDescription) else (ours, one)
        return LayerDiff(here[both[at]], there[both[at]], "refused", f"in {damaged.path}: {error}")

    sizes = [sum(_size(ours, name) for name in ours.groups.under(here[key])) for key in both]
    yield from crew.run(compared, sizes, lambda done, total: progress("comparing", done, total), THREADS)


def _read(subject: Checkpoint, prefixes: Iterable[str]) -> Iterator[str]:
    """Yield the layers that a format reads; the tensors of others are listed one by one."""
    return (prefix for prefix in prefixes if not isinstance(subject.layers[prefix], UnsupportedFormatError))


def _tensors(ours: Checkpoint, theirs: Checkpoint) -> Iterator[LayerDiff]:
    """Biases and the like, of which nothing is a layer."""
    assert ours.weights is not None
    assert theirs.weights is not None
    here, there = (
        _by_key(each, (name for name in each.account.report.used if name not in each.specs))
        for each in (ours, theirs)
    )
    for key, name in here.items():
        if key in there:
            yield tensor_diff(ours.weights.storage, name, theirs.weights.storage, there[key])
    yield from _lonely(ours, {key: here[key] for key in here.keys() - there.keys()}, theirs, True)
    yield from _lonely(theirs, {key: there[key] for key in there.keys() - here.keys()}, ours, False)


def _unread(ours: Checkpoint, theirs: Checkpoint) -> Iterator[LayerDiff]:
    """Yield an `unread` outcome for each tensor that no format reads in either checkpoint."""
    for name, reason in ours.unread.items():
        yield LayerDiff(name, name if name in theirs.prefixes else None, "unread", reason)
    for name, reason in theirs.unread.items():
        if name not in ours.unread:
            yield LayerDiff(name, name, "unread", f"{theirs.path}: {reason}")


def _lonely(
    subject: Checkpoint, names: dict[str, str], other: Checkpoint, first: bool
) -> Iterator[LayerDiff]:
    """Yield the layers and tensors of `subject` without a comparable one in `other`."""
    for key, name in names.items():
        if other.account.hides(name) or other.account.hides(key):
            told: Outcome = "unread"
            detail = f"in {other.path} it is not read"
        else:
            told, detail = "missing", f"in {subject.path} only"
        yield LayerDiff(name, None if first else name, told, detail)


def _by_key(subject: Checkpoint, names: Iterable[str]) -> dict[str, str]:
    """What layers or tensors are -> the names that they have here; a second one of a kind is its own name."""
    found: dict[str, str] = {}
    for name in names:
        key = _key(subject.architecture, name)
        found[name if key in found else key] = name
    return found


def _key(architecture: Architecture | None, name: str) -> str:
    """A name as transformers spells it, where the type of model is known; the name itself elsewhere."""
    place = architecture.find(name) if architecture else None
    return name if place is None else spelled(place.row.name, place.layer, place.expert)


def _size(subject: Checkpoint, name: str) -> int:
    assert subject.weights is not None
    return subject.weights.storage.info(name).nbytes


def _nothing(stage: str, done: int, total: int) -> None:
    """Nobody asked for progress."""
