"""Files of a checkpoint as hostile input: regular files of known identity, JSON, and remote files.

A FIFO or a device would block or never end. Each OSError becomes a StorageError with the name of the file.
"""

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from qload.errors import StorageError

OPEN_FLAGS = (
    os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
)
SPECIAL_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
MISSING_ERRNOS = (errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells a file from another that took its name, and from itself once it was written to."""

    device: int
    inode: int
    modified_ns: int
    size: int

    @classmethod
    def of(cls, found: os.stat_result) -> "FileIdentity":
        """The identity of a file that `os.stat` or `os.fstat` described."""
        return cls(found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


NO_FILE = FileIdentity(0, 0, 0, 0)  # of a header that was parsed from memory


def unreadable(file: str, error: OSError) -> StorageError:
    """The error for a file that the system does not let us read."""
    return StorageError(file, "unreadable", f"cannot be read: {error.strerror or error}")


def status(path: Path, file: str) -> os.stat_result | None:
    """What a path leads to, through links; None where there is nothing."""
    try:
        return os.stat(path)
    except ValueError:  # a NUL, which is in no file's name
        return None
    except OSError as error:
        if error.errno in MISSING_ERRNOS:
            return None
        raise unreadable(file, error) from error


def is_taken(path: Path, file: str) -> bool:
    """Whether there is something of this name, be it a link that leads to nothing."""
    try:
        os.lstat(path)
    except ValueError:
        return False
    except OSError as error:
        if error.errno in MISSING_ERRNOS:
            return False
        raise unreadable(file, error) from error
    return True


def special(found: os.stat_result) -> str | None:
    """What else than a regular file a path leads to, in words."""
    return next((words for is_such, words in SPECIAL_KINDS if is_such(found.st_mode)), None)


def is_directory(path: Path) -> bool:
    """Whether a path leads to a directory."""
    found = status(path, str(path))
    return found is not None and stat.S_ISDIR(found.st_mode)


def list_directory(folder: Path) -> list[Path]:
    """What is in a directory, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / entry.name for entry in entries)
    except OSError as error:
        raise unreadable(str(folder), error) from error


def open_regular(path: Path, file: str) -> int:
    """A descriptor to read a regular file by; the caller closes it."""
    found = status(path, file)
    if found is None:
        raise StorageError(file, "no-files", "no such file")
    _refuse_special(found, file)  # before it is opened, as devices act on that
    try:
        descriptor = os.open(path, OPEN_FLAGS)
    except OSError as error:
        raise unreadable(file, error) from error
    try:
        _refuse_special(os.fstat(descriptor), file)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_whole(path: Path, file: str, limit: int, rule: str) -> bytes:
    """All bytes of a regular file of at most `limit` bytes; the length that it says is what is read."""
    descriptor = open_regular(path, file)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise StorageError(file, rule, f"{size} bytes long, larger than {limit}")
        return read_first(descriptor, size, file)
    finally:
        os.close(descriptor)


def read_first(descriptor: int, count: int, file: str) -> bytes:
    """The next `count` bytes of a file, or what there is of them."""
    pieces: list[bytes] = []
    try:
        while count and (piece := os.read(descriptor, count)):
            pieces.append(piece)
            count -= len(piece)
    except OSError as error:
        raise unreadable(file, error) from error
    return b"".join(pieces)


def _refuse_special(found: os.stat_result, file: str) -> None:
    if words := special(found):
        raise StorageError(file, "unreadable", f"is {words}, not a regular file")


def parse_json(text: bytes, file: str, constant: Callable[[str], Any] | None = None) -> Any:
    """Any JSON value; StorageError for a key that stands twice, ValueError or RecursionError for no JSON.

    `constant`: what NaN and the infinities become, which are none of JSON's.
    """
    value = json.loads(
        text, object_pairs_hook=lambda pairs: _unique_keys(pairs, file), parse_constant=constant
    )
    if b"\\u" in text:  # half of a surrogate pair is no character, and no terminal and no file takes it
        json.dumps(value, ensure_ascii=False).encode()
    return value


def load_json(text: bytes, file: str, rule: str) -> dict[str, Any]:
    """UTF-8 -> a JSON object; StorageError with the rule."""
    try:
        value = parse_json(text.decode().encode(), file)
    except StorageError:
        raise
    except (ValueError, RecursionError) as error:
        raise StorageError(file, rule, f"not JSON: {error!s:.160}") from error
    if not isinstance(value, dict):
        raise StorageError(file, rule, f"a JSON object is needed, not {type(value).__name__}")
    return value


def shortened(name: str) -> str:
    """A name as an error shows it, however long it is."""
    return name if len(name) <= 200 else f"{name[:80]}... ({len(name)} letters)"


def _unique_keys(pairs: Sequence[tuple[str, Any]], file: str) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        name = shortened(twice.encode(errors="replace").decode())
        raise StorageError(file, "duplicate-key", "stands twice in one JSON object", name)
    return entries


class RangeReader(Protocol):
    """What fills a buffer from a position of a file on, from any number of threads."""

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer of bytes from a position on; StorageError where that cannot be done whole."""


class RemoteFile(RangeReader, Protocol):
    """A file at an address under which there is never another one."""

    @property
    def size(self) -> int:
        """Its length in bytes, as the server says it; each read is checked against it."""


Place = Path | RemoteFile  # where a tensor file is read


@dataclass(frozen=True)
class RemoteFolder(PathLike[str]):
    """A checkpoint whose tensor files are elsewhere. It goes where a path goes, and reads nothing by itself.

    Attributes
    ----------
    name
        What messages and reports call it.
    folder
        A local directory that has its JSON, and a stand-in without content for each other file.
    places
        Where the files are read whose stand-ins those are, by their names in the folder.
    """

    name: str
    folder: Path
    places: Mapping[str, Place]

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return self.name

    def real(self, files: Mapping[str, Place]) -> dict[str, Place]:
        """The places in lieu of stand-ins."""
        return {name: self.places.get(name, place) for name, place in files.items()}


def read_range(reader: RangeReader, at: int, count: int) -> bytes:
    """`count` bytes from a position on."""
    buffer = bytearray(count)
    reader.read_into(memoryview(buffer), at)
    return bytes(buffer)
