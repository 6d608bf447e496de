"""The files of a checkpoint: files of a path or of an index, and agreement of index and headers.

A path may be a folder of the cache of huggingface_hub:

    models--org--name/refs/main                 a text file: the commit of a branch or a tag
    models--org--name/snapshots/COMMIT/...      the files of that commit, as links into ../../blobs

Source: "Understand caching" in the guides of huggingface_hub.
"""

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath

from qload.errors import StorageError
from qload.storage.files import (
    Place,
    RemoteFolder,
    is_directory,
    list_directory,
    load_json,
    read_whole,
    shortened,
    special,
    status,
)
from qload.storage.header import Header, read_header
from qload.storage.unsupported_files import file_error, folder_error, mistral_notes, other_models, other_notes

SNAPSHOTS_FOLDER = "snapshots"
DEFAULT_BRANCH = "main"  # the branch that a name without a revision means
MAX_REF_BYTES = 4096  # bytes


def snapshot(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Of a model's folder in the cache, or of its `snapshots`, the one that `refs/main` names; else the path.

    StorageError where none is named and there are several.
    """
    place = Path(path)
    whole = Path(os.path.abspath(place)) if "\0" not in str(place) else place  # of "." too
    top = whole.parent if whole.name == SNAPSHOTS_FOLDER else whole
    if not top.name.startswith("models--") or not is_directory(top / SNAPSHOTS_FOLDER):
        return path
    commits = [entry.name for entry in list_directory(top / SNAPSHOTS_FOLDER)]
    ref = top / "refs" / DEFAULT_BRANCH
    if status(ref, f"refs/{DEFAULT_BRANCH}") is None:
        if len(commits) == 1:
            return top / SNAPSHOTS_FOLDER / commits[0]
        words = f"has {len(commits)} snapshots, and no refs/{DEFAULT_BRANCH} that names one of them"
    else:
        commit = (
            read_whole(ref, f"refs/{DEFAULT_BRANCH}", MAX_REF_BYTES, "unreadable")
            .decode(errors="replace")
            .strip()
        )
        if commit in commits:
            return top / SNAPSHOTS_FOLDER / commit
        words = f"refs/{DEFAULT_BRANCH} names {commit!r:.80}, which is none of its {len(commits)} snapshots"
    some = ", ".join(f"{SNAPSHOTS_FOLDER}/{commit:.80}" for commit in commits[:4])
    more = f" and {len(commits) - 4} more" if len(commits) > 4 else ""
    remedy = f"name one of them: {some}{more}" if commits else "fetch the model again"
    raise StorageError(str(place), "no-files", words, remedy=remedy)


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
        located = _files_of_directory(path.folder, path.name)
        return replace(located, files=path.real(located.files), beside=path.real(located.beside))
    if not isinstance(path, (str, PathLike)):
        files = [Path(one) for one in path]
        return CheckpointFiles({str(file): _single_file(file) for file in files})
    place = Path(snapshot(path))
    if place.name.endswith(INDEX):
        return _files_of_index(place)
    if is_directory(place):
        return _files_of_directory(place, str(place))
    return CheckpointFiles({place.name: _single_file(place)})


def _files_of_directory(place: Path, name: str) -> CheckpointFiles:
    there = list_directory(place)
    indices = [file for file in there if file.name.endswith(INDEX)]
    usual = [file for file in indices if file.name == f"{USUAL}{INDEX}"]
    if len(indices) > 1 and not usual:
        raise StorageError(
            name,
            "index-json",
            f"has several indices: {_first_names(file.name for file in indices)}",
            remedy="name one of them",
        )
    if indices:
        return _files_of_index((usual or indices)[0])
    files = {file.name: file for file in there if file.name.endswith(SUFFIX)}
    if not files:
        raise folder_error(place, there, name)
    usual_files = {file: path for file, path in files.items() if _stem(file) == USUAL} or files
    _check_shard_numbers(usual_files, files)
    beside = {file: path for file, path in files.items() if file not in usual_files}
    return CheckpointFiles(usual_files, beside=beside, others=other_models(there))


def _stem(file: str) -> str:
    """`model` of `model.safetensors` and of `model-00001-of-00002.safetensors`."""
    numbered = NUMBERED.fullmatch(file)
    return numbered[1] if numbered else file.removesuffix(SUFFIX)


def _files_of_index(index: Path) -> CheckpointFiles:
    content = load_json(read_whole(index, index.name, MAX_INDEX, "index-json"), index.name, "index-json")
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise StorageError(index.name, "index-json", "weight_map has to map tensor names to file names")
    files = {name: index.parent / name for name in sorted(set(weight_map.values()))}
    for name in files:
        _refuse_path(name, index.name)
    there = list_directory(index.parent)
    beside = {file.name: file for file in there if file.name.endswith(SUFFIX) and file.name not in files}
    if not files:
        raise StorageError(
            index.name,
            "no-tensors",
            "names no tensor" + (f", and beside it there is {_first_names(beside)}" if beside else ""),
            remedy="write the index again from the headers" if beside else "fetch the files again",
        )
    _check_existence(files, weight_map, index.name)
    _check_shard_numbers(files, beside, index.name)
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = total if type(total) is int else None
    return CheckpointFiles(files, weight_map, index.name, beside, size, other_models(there))


def _check_existence(files: Mapping[str, Path], weight_map: Mapping[str, str], index: str) -> None:
    """Every file that the index names leads to something."""
    lost = {name for name, place in files.items() if status(place, shortened(name)) is None}
    if lost:
        count = sum(file in lost for file in weight_map.values())
        raise StorageError(
            index,
            "index-missing-file",
            f"{_first_names(sorted(lost))} not there, with {count} tensors",
            remedy="fetch the missing files",
        )


def _check_shard_numbers(named: Iterable[str], there: Collection[str], index: str | None = None) -> None:
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
            names = [_shard_name(one, number) for number in lost[:9]]
            raise _missing_shard_error(
                index, one[0], names, there, f"{len(lost)} of {count} files are missing"
            )


def _shard_name(like: re.Match[str], number: int) -> str:
    """The name of another shard, with as many digits."""
    name, (start, end) = like[0], like.span(2)
    return f"{name[:start]}{number:0{end - start}}{name[end:]}"


def _missing_shard_error(
    index: str | None, like: str, lost: list[str], there: Collection[str], count: str
) -> StorageError:
    forgotten = [name for name in lost if index and name in there]
    if forgotten:
        words = f"is here, and {index} names no tensor of it"
        remedy = "write the index again from the headers"
        return StorageError(forgotten[0], "index-mismatch", words, remedy=remedy)
    words = f"{_first_names(lost)} not there: {count}"
    return StorageError(index or like, "shard-gap", words, remedy="fetch the missing files")


def _first_names(names: Iterable[str]) -> str:
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


def _single_file(path: Path) -> Path:
    found = status(path, str(path))
    if found is None:
        raise StorageError(str(path), "no-files", "no such file")
    if words := special(found):
        raise StorageError(str(path), "unreadable", f"is {words}, not a regular file")
    if path.suffix != SUFFIX:
        raise file_error(path)
    return path


def check_index(located: CheckpointFiles, headers: Mapping[str, Header]) -> Iterator[StorageError]:
    """All that makes the tensors ambiguous or incomplete: loading raises the first, `verify` tells each.

    Nothing stored at all; a tensor that two files hold; every disagreement between index and headers; a file
    that the index does not name, that other programs read in its place, and that holds the same names.
    """
    holders: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if name in holders:
                yield StorageError(file, "duplicate-tensor", f"is also in {holders[name]}", name)
            holders.setdefault(name, file)
    if not holders:
        where = located.index or ", ".join(list(headers)[:4])
        yield StorageError(where, "no-tensors", "holds no tensor", remedy="fetch the files again")
    if located.weight_map is None:
        return
    for name, file in located.weight_map.items():
        if file in headers and name not in headers[file].tensors:
            where = f"it is in {holders[name]}" if name in holders else "no file has it"
            yield StorageError(file, "index-mismatch", f"{located.index} says it is here, {where}", name)
    for name, file in holders.items():
        if name not in located.weight_map:
            yield StorageError(file, "index-mismatch", f"is here, and {located.index} does not name it", name)
    yield from _duplicate_files(located, holders)


def folder_notes(located: CheckpointFiles, headers: Mapping[str, Header]) -> Iterator[str]:
    """What differs and makes no tensor ambiguous: a total that is none, files that are not read."""
    tensors = [entry for header in headers.values() for entry in header.tensors.values()]
    stored = sum(entry.end - entry.begin for entry in tensors)
    headings = sum(header.file_size for header in headers.values()) - stored
    # Some writers count the headers too, which are up to twice as long with the metadata that copies lose.
    total = located.total_size
    if total is not None and not stored <= total <= stored + 2 * headings:
        yield f"{located.index} says total_size {total}; its tensors take {stored} bytes"
    if located.beside:
        shown = ", ".join(list(located.beside)[:4]) + (", ..." if len(located.beside) > 4 else "")
        if located.index is None:
            yield f"{len(located.beside)} files beside {next(iter(located.files))} are not read: {shown}"
        else:
            yield f"{located.index} names no tensor of {len(located.beside)} files beside it: {shown}"
    yield from other_notes(located.others)
    first = next(iter(located.files.values()), None)
    if isinstance(first, Path):
        yield from mistral_notes(located.files, first.parent)


def _duplicate_files(located: CheckpointFiles, holders: Mapping[str, str]) -> Iterator[StorageError]:
    for file in located.rivals():
        try:
            names = read_header(located.beside[file], file).tensors.keys()
        except StorageError:  # nothing can be read in place of the index
            continue
        both = [name for name in names if name in holders]
        if both:
            more = f", and {len(both) - 1} tensors more" if len(both) > 1 else ""
            yield StorageError(
                file,
                "duplicate-tensor",
                f"is also in {holders[both[0]]}, as {located.index} has it{more}; some programs read the "
                "one, some the other",
                both[0],
                remedy="remove the one that is not meant",
            )
