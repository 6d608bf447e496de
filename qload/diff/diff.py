"""`diff`: match the layers of two checkpoints by their place in the model, and compare their weights."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from os import PathLike

from qload.architecture.published_names import transformers_name
from qload.architecture.table import spelled
from qload.diff.comparison import compare_layers, compare_tensors
from qload.diff.report import CheckpointDiff, LayerDiff, unreadable
from qload.errors import StorageError, UnsupportedFormatError, checked
from qload.loader import LayerDescription
from qload.parallel import ProcessGroup
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.diagnose_diff import SideBySide
from qload.verify.report import Report
from qload.verify.workers import Workers

Progress = Callable[[str, int, int], None]  # stage, finished bytes, total bytes
MAX_THREADS = 4  # each has a block of outputs of both checkpoints in memory


@checked
def diff(
    path: str | PathLike[str],
    other: str | PathLike[str],
    *,
    progress: Progress | None = None,
    process_group: ProcessGroup | None = None,
) -> CheckpointDiff:
    """Compare the weights of two checkpoints layer by layer.

    Formats, dtypes, shards and the spellings of names that a model type has may differ. Contents of files
    raise no error. Weights are read in blocks of outputs, so files may be larger than memory.

    Parameters
    ----------
    path, other
        Safetensors files, directories, or sharded indices.
    progress
        Receives "comparing", the finished bytes of the first checkpoint, and the bytes of all its layers.
    process_group
        A group of torch.distributed. All its processes call `diff` with the same arguments, share the layers,
        and return the same report.

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
    workers = Workers.of(process_group)
    with (
        VerifiedCheckpoint.open(path, collect=True) as ours,
        VerifiedCheckpoint.open(other, collect=True) as theirs,
    ):
        for checkpoint in (ours, theirs):
            if not checkpoint.is_readable:
                refused = Report(checkpoint.path, checkpoint.findings, readable=False)
                return unreadable(ours.path, theirs.path, refused)
        try:
            layers = [
                *_compare_layers(ours, theirs, workers, progress or (lambda stage, done, total: None)),
                *_compare_tensors(ours, theirs),
                *_unread_tensors(ours, theirs),
            ]
        except StorageError as error:  # a file that failed or was replaced during the comparison
            return CheckpointDiff(ours.path, theirs.path, unreadable=str(error))
        return CheckpointDiff(ours.path, theirs.path, sorted(layers, key=lambda layer: layer.name))


def _compare_layers(
    ours: VerifiedCheckpoint, theirs: VerifiedCheckpoint, workers: Workers, progress: Progress
) -> Iterator[LayerDiff]:
    first, second = (_names_by_key(checkpoint, _read_layers(checkpoint)) for checkpoint in (ours, theirs))
    common = sorted(first.keys() & second.keys())
    yield from _unmatched(ours, first, theirs, second)
    others = {layer.prefix: layer for layer in theirs.described()}

    def compare(n: int) -> LayerDiff:
        name, other = first[common[n]], second[common[n]]
        left, right = ours.layers[name], theirs.layers[other]
        if isinstance(left, LayerDescription) and isinstance(right, LayerDescription):
            return compare_layers(SideBySide(ours, left, theirs, right), others)
        damaged, error = (theirs, right) if isinstance(left, LayerDescription) else (ours, left)
        return LayerDiff(name, other, "refused", f"in {damaged.path}: {error}")

    info = ours.weights.storage.info
    sizes = [sum(info(name).nbytes for name in ours.index.under(first[key])) for key in common]
    yield from workers.run(compare, sizes, partial(progress, "comparing"), MAX_THREADS)


def _read_layers(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield the prefixes of layers that a format reads; tensors of others are listed one by one."""
    for prefix, layer in checkpoint.layers.items():
        if not isinstance(layer, UnsupportedFormatError):
            yield prefix


def _compare_tensors(ours: VerifiedCheckpoint, theirs: VerifiedCheckpoint) -> Iterator[LayerDiff]:
    """Compare tensors outside of layers, such as biases."""
    first, second = (
        _names_by_key(side, (name for name in side.account.report.used if name not in side.specs))
        for side in (ours, theirs)
    )
    for key, name in first.items():
        if key in second:
            yield compare_tensors(ours.weights.storage, name, theirs.weights.storage, second[key])
    yield from _unmatched(ours, first, theirs, second)


def _unread_tensors(ours: VerifiedCheckpoint, theirs: VerifiedCheckpoint) -> Iterator[LayerDiff]:
    """Yield an `unread` outcome for each tensor that no format reads in either checkpoint."""
    for name, reason in ours.unread.items():
        yield LayerDiff(name, name if name in theirs.prefixes else None, "unread", reason)
    for name, reason in theirs.unread.items():
        if name not in ours.unread:
            yield LayerDiff(name, name, "unread", f"{theirs.path}: {reason}")


def _unmatched(
    ours: VerifiedCheckpoint, first: dict[str, str], theirs: VerifiedCheckpoint, second: dict[str, str]
) -> Iterator[LayerDiff]:
    """Yield the layers and tensors of one checkpoint without a comparable one in the other."""
    for key in first.keys() - second.keys():
        yield _missing(ours, first[key], None, theirs, key)
    for key in second.keys() - first.keys():
        yield _missing(theirs, second[key], second[key], ours, key)


def _missing(
    checkpoint: VerifiedCheckpoint, name: str, other_name: str | None, other: VerifiedCheckpoint, key: str
) -> LayerDiff:
    if other.account.hides(name) or other.account.hides(key):
        return LayerDiff(name, other_name, "unread", f"in {other.path} it is not read")
    return LayerDiff(name, other_name, "missing", f"in {checkpoint.path} only")


def _names_by_key(checkpoint: VerifiedCheckpoint, names: Iterable[str]) -> dict[str, str]:
    """Map keys to the names of layers or tensors; a second name with one key is its own key."""
    by_key: dict[str, str] = {}
    for name in names:
        key = _key(checkpoint, name)
        by_key[name if key in by_key else key] = name
    return by_key


def _key(checkpoint: VerifiedCheckpoint, name: str) -> str:
    """Return a name in the spelling of transformers if the model type is known, else unchanged."""
    renamed = transformers_name(checkpoint.model_config, name)
    if renamed is not None:
        return renamed
    place = checkpoint.architecture.find(name) if checkpoint.architecture else None
    return name if place is None else spelled(place.row.name, place.layer, place.expert)
