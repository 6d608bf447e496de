"""The files of a checkpoint, opened as hostile input: regular files alone, whose identity is known.

A FIFO or a device would block or never end. Every OSError on the way is a StorageError with the file's name.
"""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from qload.errors import StorageError

FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
SPECIAL = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
NOTHING = (errno.ENOENT, errno.ENOTDIR)


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
        if error.errno in NOTHING:
            return None
        raise unreadable(file, error) from error


def is_taken(path: Path, file: str) -> bool:
    """Whether there is something of this name, be it a link that leads to nothing."""
    try:
        os.lstat(path)
    except ValueError:
        return False
    except OSError as error:
        if error.errno in NOTHING:
            return False
        raise unreadable(file, error) from error
    return True


def special(found: os.stat_result) -> str | None:
    """What else than a regular file a path leads to, in words."""
    return next((words for is_such, words in SPECIAL if is_such(found.st_mode)), None)


def is_directory(path: Path) -> bool:
    """Whether a path leads to a directory."""
    found = status(path, str(path))
    return found is not None and stat.S_ISDIR(found.st_mode)


def listed(folder: Path) -> list[Path]:
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
        descriptor = os.open(path, FLAGS)
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
