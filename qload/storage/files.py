"""Files of a checkpoint as hostile input: special files refused, changes noticed, JSON, files on a server.

A FIFO or a device would block or never end. Each OSError becomes a StorageError with the name of the file.
"""

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from qload.errors import StorageError

OPEN_FLAGS = (
    os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
)
SPECIAL_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
LFS_POINTER = b"version https://git-lfs"  # first bytes of a pointer in the place of a file
MISSING_ERRNOS = (errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True)
class FileIdentity:
    """Identity of a file: changes with a replacement of the file, and with a write to it."""

    device: int
    inode: int
    modified_ns: int
    size: int

    @classmethod
    def of(cls, stats: os.stat_result) -> "FileIdentity":
        """Identity in the result of `os.stat` or `os.fstat`."""
        return cls(stats.st_dev, stats.st_ino, stats.st_mtime_ns, stats.st_size)


NO_FILE = FileIdentity(0, 0, 0, 0)  # for a header in memory


MAX_PATH_LETTERS = 4096  # of a path in Linux; longer names come from files


def unreadable(file: str, error: OSError) -> StorageError:
    """Build the error for a file that cannot be opened or read."""
    file = file if len(file) <= MAX_PATH_LETTERS else shortened(file)
    return StorageError(file, "unreadable", f"cannot be read: {error.strerror or error}")


def status(path: Path, file: str) -> os.stat_result | None:
    """Result of `os.stat`, which follows links; None for a missing file or a broken link."""
    try:
        return os.stat(path)
    except ValueError:  # a NUL in the name
        return None
    except OSError as error:
        if error.errno in MISSING_ERRNOS:
            return None
        raise unreadable(file, error) from error


def is_taken(path: Path, file: str) -> bool:
    """Return whether a file exists; a broken link counts."""
    try:
        os.lstat(path)
    except ValueError:
        return False
    except OSError as error:
        if error.errno in MISSING_ERRNOS:
            return False
        raise unreadable(file, error) from error
    return True


def special(stats: os.stat_result) -> str | None:
    """Describe a file that is not regular, such as "a directory"; None for a regular file."""
    return SPECIAL_KINDS.get(stat.S_IFMT(stats.st_mode))


def is_directory(path: Path) -> bool:
    """Return whether a path, or the target of a link, is a directory."""
    stats = status(path, str(path))
    return stats is not None and stat.S_ISDIR(stats.st_mode)


def list_directory(folder: Path) -> list[Path]:
    """List the paths in a directory, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / entry.name for entry in entries)
    except OSError as error:
        raise unreadable(str(folder), error) from error


def list_subfolders(folder: Path) -> list[Path]:
    """List the directories in a directory, and links to one, sorted by name, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                folder / entry.name for entry in entries if entry.name[0] != "." and os.path.isdir(entry)
            )
    except OSError as error:
        raise unreadable(str(folder), error) from error


def open_regular(path: Path, file: str) -> int:
    """Open a regular file for reading and return its descriptor; the caller closes it."""
    stats = status(path, file)
    if stats is None:
        raise StorageError(file, "no-files", "no such file")
    if words := special(stats):  # opening a device may have effects
        raise StorageError(file, "unreadable", f"is {words}, not a regular file")
    try:
        descriptor = os.open(path, OPEN_FLAGS)
    except OSError as error:
        raise unreadable(file, error) from error
    try:
        if words := special(os.fstat(descriptor)):
            raise StorageError(file, "unreadable", f"is {words}, not a regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_whole(path: Path, file: str, limit: int, rule: str) -> bytes:
    """Read a regular file of at most `limit` bytes, up to its size at opening."""
    descriptor = open_regular(path, file)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise StorageError(file, rule, f"{size} bytes long, larger than {limit}")
        return read_first(descriptor, size, file)
    finally:
        os.close(descriptor)


def read_first(descriptor: int, count: int, file: str) -> bytes:
    """Read the next `count` bytes of a file, or all bytes left."""
    pieces: list[bytes] = []
    try:
        while count and (piece := os.read(descriptor, count)):
            pieces.append(piece)
            count -= len(piece)
    except OSError as error:
        raise unreadable(file, error) from error
    return b"".join(pieces)


def parse_json(text: bytes, file: str, constant: Callable[[str], Any] | None = None) -> Any:
    """Parse a JSON value; StorageError for a duplicate key, ValueError or RecursionError for other errors.

    `constant`: hook for NaN and the infinities, which are not JSON.
    """
    if text.startswith(LFS_POINTER):
        words = "is a Git LFS pointer in the place of the file"
        raise StorageError(file, "not-safetensors", words, remedy="fetch the file: git lfs pull")
    hook = partial(_unique_keys, file)
    value = json.loads(text, object_pairs_hook=hook, parse_constant=constant)
    if b"\\u" in text:  # a lone surrogate cannot be encoded, so that it could not be printed or written
        json.dumps(value, ensure_ascii=False).encode()
    return value


def load_json(text: bytes, file: str, rule: str) -> dict[str, Any]:
    """Parse a JSON object from UTF-8; StorageError with `rule` for other content."""
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
    """Text of a name for an error: short for any length."""
    return name if len(name) <= 200 else f"{name[:80]}... ({len(name)} letters)"


def _unique_keys(file: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        previous: set[str] = set()
        for key, _ in pairs:
            if key in previous:
                name = shortened(key.encode(errors="replace").decode())
                raise StorageError(file, "duplicate-key", "occurs twice in one JSON object", name)
            previous.add(key)
    return entries


class RangeReader(Protocol):
    """A file with positioned reads, from any number of threads."""

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer with the bytes from a position; StorageError for a file that ends before."""


class RemoteFile(RangeReader, Protocol):
    """A file on a server, at an address with constant content."""

    @property
    def size(self) -> int:
        """Length in bytes, as stated by the server; each read is checked against it."""


Place = Path | RemoteFile  # location of a tensor file


@dataclass(frozen=True)
class RemoteFolder(PathLike[str]):
    """A checkpoint with remote tensor files, accepted in place of a path. Headers and ranges are read alone.

    Attributes
    ----------
    name
        Name for messages and reports.
    folder
        A local directory with the JSON files, and an empty placeholder for each other file.
    places
        Locations of the files with a placeholder, by name in the folder.
    """

    name: str
    folder: Path
    places: Mapping[str, Place]

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return self.name

    def real(self, files: Mapping[str, Place]) -> dict[str, Place]:
        """Replace placeholders by the locations of their files."""
        return {name: self.places.get(name, place) for name, place in files.items()}


def read_range(reader: RangeReader, at: int, count: int) -> bytes:
    """Read `count` bytes from a position."""
    buffer = bytearray(count)
    reader.read_into(memoryview(buffer), at)
    return bytes(buffer)
