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
from qload.storage.gguf_header import GGUFHeader
from qload.storage.header import Header, read_header
from qload.storage.stray_files import (
    adapter_note,
    fetch_remedy,
    folder_strays,
    is_hidden,
    model_folders,
    stray_notes,
    unfinished_downloads,
)
from qload.storage.unsupported_files import file_error, folder_error, mistral_notes, other_models, other_notes

SNAPSHOTS_FOLDER = "snapshots"
DEFAULT_BRANCH = "main"  # the branch for a name without a revision
MAX_REF_BYTES = 4096  # bytes


def snapshot(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Snapshot of `refs/main`, for a model's folder in the cache or its `snapshots`; other paths unchanged.

    StorageError for several snapshots without `refs/main`.
    """
    place = Path(path)
    absolute = Path(os.path.abspath(place)) if "\0" not in str(place) else place
    top = absolute.parent if absolute.name == SNAPSHOTS_FOLDER else absolute
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
        words = (
            f"refs/{DEFAULT_BRANCH} names {commit!r:.80}, which is not one of its {len(commits)} snapshots"
        )
    some = ", ".join(f"{SNAPSHOTS_FOLDER}/{commit:.80}" for commit in commits[:4])
    more = f" and {len(commits) - 4} more" if len(commits) > 4 else ""
    remedy = f"name one of them: {some}{more}" if commits else "fetch the model again"
    raise StorageError(str(place), "no-files", words, remedy=remedy)


SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"
USUAL = "model"  # stem of the file, or of the numbered files, that transformers writes
MAX_INDEX = 100_000_000  # bytes: the format's limit for a header, which has more text per tensor
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")  # of a file in the index's folder
GGUF_SUFFIX = ".gguf"
NUMBERED = re.compile(r"(.+)-([0-9]{1,6})-of-([0-9]{1,6})\.(?:safetensors|gguf)", re.DOTALL)
GGUF_COMPANIONS = ("mmproj", "imatrix")  # words in the names of files that are no text models
Headers = Mapping[str, Header] | Mapping[str, GGUFHeader]
PathLikes = str | PathLike[str] | Sequence[str | PathLike[str]]


@dataclass(frozen=True)
class CheckpointFiles:
    """Files of a checkpoint by their names in messages, with the content of an index, if any.

    Attributes
    ----------
    files
        Files to read.
    weight_map, index
        Tensor name -> file, and the name of the index; None without an index.
    beside
        Safetensors files in the folder that are not read: not in the index, or without the usual name.
    total_size
        Bytes of all tensors, as stated in the index.
    others
        Names of files in the folder that may hold a model in another format.
    folders
        Names of subfolders with models.
    unfinished
        Names of downloads into the folder that did not end.
    """

    files: Mapping[str, Place]
    weight_map: Mapping[str, str] | None = None
    index: str | None = None
    beside: Mapping[str, Place] = field(default_factory=dict)
    total_size: int | None = None
    others: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()

    @property
    def shard(self) -> bool:
        """True if the path named a single one of several numbered files."""
        numbered = [NUMBERED.fullmatch(file) for file in self.files] if self.index is None else []
        return len(numbered) == 1 and numbered[0] is not None and int(numbered[0][3]) > 1

    @property
    def is_gguf(self) -> bool:
        """True for the files of a GGUF model."""
        return all(file.endswith(GGUF_SUFFIX) for file in self.files)

    def rivals(self) -> Iterator[str]:
        """Yield the names of unread files that other programs may read instead of the index."""
        for file in self.beside:
            if self.index is not None and file == self.index.removesuffix(INDEX) + SUFFIX:
                yield file

    def older(self) -> list[str]:
        """List the unread shards of another division of the same model."""
        numbered = [file for file in self.beside if NUMBERED.fullmatch(file)]
        stems = {_stem(file) for file in self.files} if numbered else set()
        return [file for file in numbered if _stem(file) in stems]


def locate(path: PathLikes) -> CheckpointFiles:
    """Find the files of a checkpoint: a file, several files, a directory, or an index; StorageError.

    A model's folder in the cache of huggingface_hub stands for the snapshot of its refs/main.
    """
    if isinstance(path, RemoteFolder):
        located = _files_of_directory(path.folder, path.name)
        return replace(located, files=path.real(located.files), beside=path.real(located.beside))
    if not isinstance(path, (str, PathLike)):
        return CheckpointFiles({str(Path(file)): _single_file(Path(file)) for file in path})
    place = Path(snapshot(path))
    if place.name.endswith(INDEX):
        return _files_of_index(place)
    if is_directory(place):
        return _files_of_directory(place, str(place))
    if place.suffix == GGUF_SUFFIX and NUMBERED.fullmatch(place.name) and status(place, place.name):
        return _gguf_model(list_directory(place.parent), _stem(place.name))
    return CheckpointFiles({place.name: _single_file(place)})


def _gguf_model(listing: Sequence[Path], stem: str) -> CheckpointFiles:
    """Files of the GGUF model with a stem; StorageError for a gap among numbered files."""
    files = {file.name: file for file in listing if file.suffix == GGUF_SUFFIX and _stem(file.name) == stem}
    _check_shard_numbers(files, files)
    return CheckpointFiles(files)


def _gguf_folder(listing: Sequence[Path], name: str) -> CheckpointFiles | None:
    """Files of the only GGUF model in a folder; None without GGUF files, StorageError for several models."""
    stored = [file for file in listing if file.suffix == GGUF_SUFFIX]
    models = [file for file in stored if not any(word in file.name for word in GGUF_COMPANIONS)] or stored
    stems = list(dict.fromkeys(_stem(file.name) for file in models))
    if len(stems) > 1:
        words = f"has several GGUF models: {_first_names(file.name for file in models)}"
        raise StorageError(name, "no-files", words, remedy="name one of the files")
    if not stems:
        return None
    located = _gguf_model(models, stems[0])
    return replace(located, beside={file.name: file for file in stored if file.name not in located.files})


def _files_of_directory(place: Path, name: str) -> CheckpointFiles:
    listing = list_directory(place)
    indices = [file for file in listing if file.name.endswith(INDEX) and not is_hidden(file)]
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
    stored = {file.name: file for file in listing if file.name.endswith(SUFFIX)}
    files = {file: path for file, path in stored.items() if not is_hidden(path)}
    folders, unfinished = model_folders(place), unfinished_downloads(place, listing)
    remedy = fetch_remedy(unfinished)
    if not files:
        if gguf := _gguf_folder(listing, name):
            return replace(gguf, folders=folders, unfinished=unfinished)
        raise folder_error(place, listing, name, folders, remedy if unfinished else "")
    usual_files = {file: path for file, path in files.items() if _stem(file) == USUAL} or files
    _check_divisions(usual_files)
    _check_shard_numbers(usual_files, files, remedy=remedy)
    unread = {file: path for file, path in stored.items() if file not in usual_files}
    return CheckpointFiles(
        usual_files, beside=unread, others=other_models(listing), folders=folders, unfinished=unfinished
    )


def _check_divisions(names: Iterable[str]) -> None:
    """Raise StorageError for numbered files of one model in several divisions, which no index names."""
    divisions: dict[str, dict[str, str]] = defaultdict(dict)  # stem -> count -> first file
    for name in names:
        if numbered := NUMBERED.fullmatch(name):
            divisions[numbered[1]].setdefault(numbered[3], name)
    for files in divisions.values():
        if len(files) > 1:
            first, *others = files.values()
            words = (
                f"numbered files of another division are in the folder, and no index: {_first_names(others)}"
            )
            remedy = "remove the files of the older upload, or fetch the index"
            raise StorageError(first, "duplicate-tensor", words, remedy=remedy)


def _stem(file: str) -> str:
    """`model.safetensors`, `model-00001-of-00002.safetensors` -> `model`."""
    numbered = NUMBERED.fullmatch(file)
    return numbered[1] if numbered else file.removesuffix(SUFFIX).removesuffix(GGUF_SUFFIX)


def _files_of_index(index: Path) -> CheckpointFiles:
    content = load_json(read_whole(index, index.name, MAX_INDEX, "index-json"), index.name, "index-json")
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise StorageError(index.name, "index-json", "weight_map has to map tensor names to file names")
    files = {name: index.parent / name for name in sorted(set(weight_map.values()))}
    for name in files:
        if not PLAIN_NAME.fullmatch(name):
            _refuse_path(name, index.name)
    listing = list_directory(index.parent)
    unread = {file.name: file for file in listing if file.name.endswith(SUFFIX) and file.name not in files}
    if not files:
        raise StorageError(
            index.name,
            "no-tensors",
            "names no tensor" + (f", and its folder has {_first_names(unread)}" if unread else ""),
            remedy="write the index again from the headers" if unread else "fetch the files again",
        )
    folders, unfinished = model_folders(index.parent), unfinished_downloads(index.parent, listing)
    remedy = fetch_remedy(unfinished)
    missing = set()
    for name, place in files.items():
        if status(place, shortened(name)) is None:
            missing.add(name)
    if missing:
        count = sum(file in missing for file in weight_map.values())
        stems = set(map(_stem, files))
        newer = [file for file in unread if NUMBERED.fullmatch(file) and _stem(file) in stems]
        if newer:
            remedy += f"; or fetch the index again, if {_first_names(newer)} belong to a newer upload"
        raise StorageError(
            index.name,
            "index-missing-file",
            f"{_first_names(sorted(missing))} not found, with {count} tensors",
            remedy=remedy,
        )
    _check_shard_numbers(files, unread, index.name, remedy=remedy)
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = total if type(total) is int else None
    others = other_models(listing)
    return CheckpointFiles(files, weight_map, index.name, unread, size, others, folders, unfinished)


def _check_shard_numbers(
    names: Iterable[str],
    stored: Collection[str],
    index: str | None = None,
    remedy: str = "fetch the missing files",
) -> None:
    """Raise StorageError for a gap among files -k-of-n, numbered from 0 or from 1; `stored`: all files."""
    families: dict[tuple[str, int], dict[int, re.Match[str]]] = defaultdict(dict)
    for name in names:
        if numbered := NUMBERED.fullmatch(name):
            families[numbered[1], int(numbered[3])][int(numbered[2])] = numbered
    for (_, count), members in families.items():
        missing = [number for number in range(1, count + (0 not in members)) if number not in members]
        if not missing:
            continue
        member = next(iter(members.values()))
        (start, end), first = member.span(2), member[0]
        lost = [f"{first[:start]}{number:0{end - start}}{first[end:]}" for number in missing[:9]]
        unlisted = [name for name in lost if index and name in stored]
        if unlisted:
            words = f"exists, and {index} names no tensor of it"
            again = "write the index again from the headers"
            raise StorageError(unlisted[0], "index-mismatch", words, remedy=again)
        words = f"{_first_names(lost)} not found: {len(missing)} of {count} files are missing"
        raise StorageError(index or first, "shard-gap", words, remedy=remedy)


def _first_names(names: Iterable[str]) -> str:
    """Text with the first four of many names."""
    shown = [shortened(name) for name in names]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _refuse_path(name: str, index: str) -> None:
    parts = PurePosixPath(name).parts
    outside = ".." in parts or name.startswith("/") or "\\" in name or "\0" in name
    if not name or outside or PureWindowsPath(name).drive or not name.endswith(SUFFIX):
        words = f"names a file that is not a safetensors file in its folder: {name!r:.80}"
        raise StorageError(index, "index-path", words)


def _single_file(path: Path) -> Path:
    stats = status(path, str(path))
    if stats is None:
        raise StorageError(str(path), "no-files", "no such file")
    if words := special(stats):
        raise StorageError(str(path), "unreadable", f"is {words}, not a regular file")
    if path.suffix not in (SUFFIX, GGUF_SUFFIX):
        raise file_error(path)
    return path


def check_index(located: CheckpointFiles, headers: Headers) -> Iterator[StorageError]:
    """Yield an error for each ambiguous or missing tensor; loading raises the first, `verify` reports all.

    Errors: no tensors at all; a tensor in two files; a contradiction between index and headers; tensors of
    the same names in a file that other programs read instead of the index.
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
            words = f"{located.index} maps it to this file, and {where}"
            yield StorageError(file, "index-mismatch", words, name)
    for name, file in holders.items():
        if name not in located.weight_map:
            words = f"is in this file, and {located.index} does not name it"
            yield StorageError(file, "index-mismatch", words, name)
    for file in located.rivals():
        try:
            names = read_header(located.beside[file], file).tensors.keys()
        except StorageError:  # no program can read this file
            continue
        both = [name for name in names if name in holders]
        if both:
            more = f", and so are {len(both) - 1} more" if len(both) > 1 else ""
            source = f"{holders[both[0]]}, as in {located.index}{more}"
            words = f"is also in {source}; programs differ in which they read"
            yield StorageError(file, "duplicate-tensor", words, both[0], remedy="remove the wrong file")


def folder_notes(located: CheckpointFiles, headers: Headers) -> Iterator[str]:
    """Yield a note for each contradiction that leaves the tensors unambiguous: total size, unread files."""
    stored = sum(entry.end - entry.begin for header in headers.values() for entry in header.tensors.values())
    headings = sum(header.file_size for header in headers.values()) - stored
    # Some writers count the headers, up to twice as long with metadata that a copy has lost.
    total = located.total_size
    if total is not None and not stored <= total <= stored + 2 * headings:
        yield f"{located.index} says total_size {total}; its tensors take {stored} bytes"
    notes, rest = stray_notes(located.beside, located.older())
    if rest:
        names = ", ".join(rest[:4]) + (", ..." if len(rest) > 4 else "")
        if located.index is None:
            read = next(iter(located.files))
            yield f"{len(rest)} files in the folder of {read} are not read: {names}"
        else:
            yield f"{located.index} names no tensor of {len(rest)} files in its folder: {names}"
    yield from notes
    yield from folder_strays(located.folders, located.unfinished)
    yield from other_notes(located.others)
    first = next(iter(located.files.values()), None)
    if isinstance(first, Path):
        yield from mistral_notes(located.files, first.parent)
        yield from adapter_note(list(located.files), first.parent)
