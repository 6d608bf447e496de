"""Checkpoint files for transformers: those that `open_checkpoint` finds, whatever their names are.

transformers looks for `model.safetensors` and its index alone. It takes another name from its config, of one
file or an index; further files are added to its list of files before it reads any.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike, path
from pathlib import Path
from typing import Any

from qload.errors import ArgumentError, StorageError
from qload.storage import locate, snapshot
from qload.storage.checkpoint_files import INDEX, SUFFIX, USUAL, CheckpointFiles

FOUND = "qload_files"  # a key of the model's config between `load` and the quantizer
NAME = "transformers_weights"  # transformers' key for the name of the file, or of the index
USUAL_NAMES = (f"{USUAL}{SUFFIX}", f"{USUAL}{INDEX}")
VARIANT = re.compile(r"model\.[^.]+\.safetensors(\.index\.json)?")
CHOICES = ("variant", "gguf_file", "state_dict")  # options that name other files
NOT_FOUND = ("no file named", "not appear to have a file named")  # in transformers' OSError


def folder_and_files(
    place: str | PathLike[str], options: dict[str, Any]
) -> tuple[str | PathLike[str], list[str]]:
    """The folder that transformers is to open, and the files in it; StorageError where there are none.

    No files of a model's name on the hub, and where `options` of `from_pretrained` name others: transformers
    finds them.
    """
    chosen = any(options.get(key) is not None for key in CHOICES) or options.get("use_safetensors") is False
    if chosen or not path.exists(place):
        return place, []
    root = Path(snapshot(place))
    where = root / options.get("subfolder", "") if root.is_dir() else root
    files = _names(locate(where), where if where.is_dir() else where.parent)
    return root if root.is_dir() else root.parent, files


def unusual_files(folder: str) -> list[str] | None:
    """The files of a folder in which transformers would find none; None where it finds some by itself."""
    if not path.isdir(folder):
        return None
    names = {each.name for each in Path(folder).iterdir() if each.name.endswith((SUFFIX, INDEX))}
    if not names or not names.isdisjoint(USUAL_NAMES) or any(map(VARIANT.fullmatch, names)):
        return None
    return _names(locate(folder), Path(folder))


def _names(located: CheckpointFiles, folder: Path) -> list[str]:
    """The paths of the files; before them that of the index, where there is one."""
    index = [] if located.index is None else [str(folder / located.index)]
    return [*index, *map(str, located.files.values())]


def complete(checkpoint_files: list[str], found: Sequence[str]) -> None:
    """Add to transformers' list of files those that were `found` with the one that it was told of."""
    files = [file for file in found if file.endswith(SUFFIX)]
    if checkpoint_files and any(path.samefile(checkpoint_files[0], file) for file in files):
        checkpoint_files[:] = files


def check_files(checkpoint_files: Sequence[str]) -> None:
    """ArgumentError where `open_checkpoint` finds other files in the folder than transformers has found.

    One file of a variant, which a user has named, may have others beside it.
    """
    theirs = {Path(file).name for file in checkpoint_files}
    folder = str(Path(checkpoint_files[0]).parent) if checkpoint_files else ""
    if not theirs or (len(theirs) == 1 and all(map(VARIANT.fullmatch, theirs))):
        return
    ours = {Path(str(file)).name for file in locate(folder).files.values()}
    if not ours <= theirs:
        expected = f"one set of files: qload finds {_some(ours - theirs)} in {folder}"
        raise ArgumentError("checkpoint", expected, f"{_some(theirs)} of transformers; remove either")


def _some(names: set[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:3]) + (f" and {len(first) - 3} more" if first[3:] else "")


@contextmanager
def named_files(place: str | PathLike[str]) -> Iterator[None]:
    """Inside, an OSError of transformers about names of files is a StorageError with a remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError) or not any(text in str(error) for text in NOT_FOUND):
            raise
        what = f"transformers finds no file of weights: {str(error).splitlines()[0]:.200}"
        remedy = "download all its files into a folder, and load that: files of other names are found there"
        raise StorageError(str(place), "no-files", what, remedy=remedy) from error
