"""Which files make up a checkpoint, and whether they agree with the index that names them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath

from qload.errors import StorageError
from qload.storage.header import Header, load_json

INDEX = ".safetensors.index.json"
MAX_INDEX = 1 << 30
PathLikes = str | PathLike[str] | Sequence[str | PathLike[str]]


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files to read, by the name they go by in messages, and the index' weight_map, if there is one."""

    files: Mapping[str, Path]
    weight_map: Mapping[str, str] | None = None
    index: str | None = None


def locate(path: PathLikes) -> CheckpointFiles:
    """One file, several, a directory, or an index file -> the files to read; StorageError."""
    if not isinstance(path, (str, PathLike)):
        files = [Path(one) for one in path]
        return CheckpointFiles({str(file): _tensor_file(file) for file in files})
    place = Path(path)
    if place.name.endswith(INDEX):
        return _indexed(place)
    if place.is_dir():
        return _directory(place)
    return CheckpointFiles({place.name: _tensor_file(place)})


def check_index(located: CheckpointFiles, headers: Mapping[str, Header]) -> Iterator[StorageError]:
    """Every tensor that two files hold, and every disagreement between index and headers."""
    holders: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if name in holders:
                yield StorageError(file, "duplicate-tensor", f"is also in {holders[name]}", name)
            holders.setdefault(name, file)
    if located.weight_map is None:
        return
    for name, file in located.weight_map.items():
        if file in headers and name not in headers[file].tensors:
            where = f"it is in {holders[name]}" if name in holders else "no file has it"
            yield StorageError(file, "index-mismatch", f"{located.index} says it is here, {where}", name)
    for name, file in holders.items():
        if name not in located.weight_map:
            yield StorageError(file, "index-mismatch", f"is here, and {located.index} does not name it", name)


def _directory(place: Path) -> CheckpointFiles:
    indices = sorted(file for file in place.iterdir() if file.name.endswith(INDEX))
    usual = [file for file in indices if file.name == f"model{INDEX}"]
    if len(indices) > 1 and not usual:
        names = ", ".join(file.name for file in indices)
        raise StorageError(
            place.name, "index-json", f"has several indices: {names}", remedy="name one of them"
        )
    if indices:
        return _indexed((usual or indices)[0])
    files = sorted(place.glob("*.safetensors"))
    if not files:
        raise StorageError(str(place), "no-files", "no *.safetensors file in this directory")
    return CheckpointFiles({file.name: file for file in files})


def _indexed(index: Path) -> CheckpointFiles:
    try:
        if index.stat().st_size > MAX_INDEX:
            raise StorageError(index.name, "index-json", f"larger than {MAX_INDEX} bytes")
        weight_map = load_json(index.read_bytes(), index.name, "index-json").get("weight_map")
    except OSError as error:
        raise StorageError(index.name, "no-files", f"cannot be read: {error.strerror or error}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise StorageError(index.name, "index-json", "weight_map has to map tensor names to file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        _refuse_path(name, index.name)
    lost = [name for name in names if not (index.parent / name).is_file()]
    if lost:
        count = sum(file in lost for file in weight_map.values())
        raise StorageError(
            index.name,
            "index-missing-file",
            f"{', '.join(lost)} not there, with {count} tensors",
            remedy="fetch the missing files",
        )
    return CheckpointFiles({name: index.parent / name for name in names}, weight_map, index.name)


def _refuse_path(name: str, index: str) -> None:
    parts = PurePosixPath(name).parts
    outside = ".." in parts or name.startswith("/") or "\\" in name or "\0" in name
    if not name or outside or PureWindowsPath(name).drive or not name.endswith(".safetensors"):
        raise StorageError(
            index, "index-path", f"names a file that is not a safetensors file beside it: {name!r:.80}"
        )


def _tensor_file(path: Path) -> Path:
    if not path.is_file():
        raise StorageError(str(path), "no-files", "no such file")
    if path.suffix != ".safetensors":
        raise StorageError(
            path.name, "not-safetensors", "not a *.safetensors file; other kinds may run code and are refused"
        )
    return path
