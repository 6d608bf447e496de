"""Which files make up a checkpoint, by their names alone."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath

from qload.errors import StorageError
from qload.storage.files import is_directory, listed, read_whole, special, status
from qload.storage.foreign import other_models, refused_file, refused_folder
from qload.storage.hostile_json import load_json, shortened
from qload.storage.hub_cache import snapshot
from qload.storage.remote import Place, RemoteFolder

SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"
USUAL = "model"  # what transformers calls the file, or the files that it numbers
MAX_INDEX = 100_000_000  # as the format has it for a header, which says more of each tensor
NUMBERED = re.compile(r"(.+)-([0-9]{1,6})-of-([0-9]{1,6})\.safetensors", re.DOTALL)
PathLikes = str | PathLike[str] | Sequence[str | PathLike[str]]


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files to read, by the name they go by in messages; and what an index says, if there is one.

    `beside`: the safetensors files in the folder that are not read, as the index does not name them, or as
    there are others under the usual names. `total_size`: in bytes, as the index has it. `others`: names of
    what else in the folder may hold a model, in other formats.
    """

    files: Mapping[str, Place]
    weight_map: Mapping[str, str] | None = None
    index: str | None = None
    beside: Mapping[str, Place] = field(default_factory=dict)
    total_size: int | None = None
    others: tuple[str, ...] = ()

    @property
    def shard(self) -> bool:
        """Whether this is one of several numbered files, asked for by itself."""
        numbered = [NUMBERED.fullmatch(file) for file in self.files] if self.index is None else []
        return len(numbered) == 1 and numbered[0] is not None and int(numbered[0][3]) > 1

    def rivals(self) -> Iterator[str]:
        """Of the files beside the index those that other programs may read in its place, by their names."""
        for file in self.beside:
            if self.index is not None and _stem(file) == self.index.removesuffix(INDEX):
                yield file


def locate(path: PathLikes) -> CheckpointFiles:
    """One file, several, a directory, or an index file -> the files to read; StorageError.

    A model's folder in the cache of huggingface_hub means the snapshot that its refs/main names.
    """
    if isinstance(path, RemoteFolder):
        located = _directory(path.folder, path.name)
        return replace(located, files=path.real(located.files), beside=path.real(located.beside))
    if not isinstance(path, (str, PathLike)):
        files = [Path(one) for one in path]
        return CheckpointFiles({str(file): _tensor_file(file) for file in files})
    place = Path(snapshot(path))
    if place.name.endswith(INDEX):
        return _indexed(place)
    if is_directory(place):
        return _directory(place, str(place))
    return CheckpointFiles({place.name: _tensor_file(place)})


def _directory(place: Path, name: str) -> CheckpointFiles:
    there = listed(place)
    indices = [file for file in there if file.name.endswith(INDEX)]
    usual = [file for file in indices if file.name == f"{USUAL}{INDEX}"]
    if len(indices) > 1 and not usual:
        raise StorageError(
            name,
            "index-json",
            f"has several indices: {_some(file.name for file in indices)}",
            remedy="name one of them",
        )
    if indices:
        return _indexed((usual or indices)[0])
    files = {file.name: file for file in there if file.name.endswith(SUFFIX)}
    if not files:
        raise refused_folder(place, there, name)
    usual_files = {file: path for file, path in files.items() if _stem(file) == USUAL} or files
    _check_numbers(usual_files, files)
    beside = {file: path for file, path in files.items() if file not in usual_files}
    return CheckpointFiles(usual_files, beside=beside, others=other_models(there))


def _stem(file: str) -> str:
    """`model` of `model.safetensors` and of `model-00001-of-00002.safetensors`."""
    numbered = NUMBERED.fullmatch(file)
    return numbered[1] if numbered else file.removesuffix(SUFFIX)


def _indexed(index: Path) -> CheckpointFiles:
    content = load_json(read_whole(index, index.name, MAX_INDEX, "index-json"), index.name, "index-json")
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise StorageError(index.name, "index-json", "weight_map has to map tensor names to file names")
    files = {name: index.parent / name for name in sorted(set(weight_map.values()))}
    for name in files:
        _refuse_path(name, index.name)
    there = listed(index.parent)
    beside = {file.name: file for file in there if file.name.endswith(SUFFIX) and file.name not in files}
    if not files:
        raise StorageError(
            index.name,
            "no-tensors",
            "names no tensor" + (f", and beside it there is {_some(beside)}" if beside else ""),
            remedy="write the index again from the headers" if beside else "fetch the files again",
        )
    _check_there(files, weight_map, index.name)
    _check_numbers(files, beside, index.name)
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = total if type(total) is int else None
    return CheckpointFiles(files, weight_map, index.name, beside, size, other_models(there))


def _check_there(files: Mapping[str, Path], weight_map: Mapping[str, str], index: str) -> None:
    """Every file that the index names leads to something."""
    lost = {name for name, place in files.items() if status(place, shortened(name)) is None}
    if lost:
        count = sum(file in lost for file in weight_map.values())
        raise StorageError(
            index,
            "index-missing-file",
            f"{_some(sorted(lost))} not there, with {count} tensors",
            remedy="fetch the missing files",
        )


def _check_numbers(named: Iterable[str], there: Collection[str], index: str | None = None) -> None:
    """Files that are numbered -k-of-n are all named, be it from 0 or from 1."""
    families: dict[tuple[str, int], dict[int, re.Match[str]]] = defaultdict(dict)
    for name in named:
        if numbered := NUMBERED.fullmatch(name):
            families[numbered[1], int(numbered[3])][int(numbered[2])] = numbered
    for (_, count), members in families.items():
        needed = range(0 if 0 in members else 1, count + (0 not in members))
        lost = [number for number in needed if number not in members]
        if lost:
            one = next(iter(members.values()))
            names = [_with_number(one, number) for number in lost[:9]]
            raise _gap(index, one[0], names, there, f"{len(lost)} of {count} files are missing")


def _with_number(like: re.Match[str], number: int) -> str:
    """The name of another shard, with as many digits."""
    name, (start, end) = like[0], like.span(2)
    return f"{name[:start]}{number:0{end - start}}{name[end:]}"


def _gap(index: str | None, like: str, lost: list[str], there: Collection[str], count: str) -> StorageError:
    forgotten = [name for name in lost if index and name in there]
    if forgotten:
        words = f"is here, and {index} names no tensor of it"
        remedy = "write the index again from the headers"
        return StorageError(forgotten[0], "index-mismatch", words, remedy=remedy)
    words = f"{_some(lost)} not there: {count}"
    return StorageError(index or like, "shard-gap", words, remedy="fetch the missing files")


def _some(names: Iterable[str]) -> str:
    """The first few of many names."""
    shown = [shortened(name) for name in names]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _refuse_path(name: str, index: str) -> None:
    parts = PurePosixPath(name).parts
    outside = ".." in parts or name.startswith("/") or "\\" in name or "\0" in name
    if not name or outside or PureWindowsPath(name).drive or not name.endswith(SUFFIX):
        raise StorageError(
            index, "index-path", f"names a file that is not a safetensors file beside it: {name!r:.80}"
        )


def _tensor_file(path: Path) -> Path:
    found = status(path, str(path))
    if found is None:
        raise StorageError(str(path), "no-files", "no such file")
    if words := special(found):
        raise StorageError(str(path), "unreadable", f"is {words}, not a regular file")
    if path.suffix != SUFFIX:
        raise refused_file(path)
    return path
