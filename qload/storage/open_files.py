"""A few open files of many, read at positions, by any number of threads.

A file is opened when it is first read and stays open until others are read more. There is no memory map: a
file that is cut short under its reader would end the process, and one that is written to would mix both.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from qload.errors import StorageError
from qload.storage.files import FileIdentity, open_regular, unreadable
from qload.storage.remote import Place, RangeReader

OPEN_FILES = 16  # that are kept open; more threads than this keep one each


class OpenFile:
    """An open file, and how many threads read it. Closes itself when nothing refers to it."""

    def __init__(self, descriptor: int, file: str) -> None:
        self.descriptor, self.file, self.users = descriptor, file, 0
        self._position = Lock()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, once."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer of bytes from a position on; StorageError where the file ends before."""
        need = len(buffer)
        try:
            while len(buffer) and (count := self._some(buffer, at)):
                buffer, at = buffer[count:], at + count
        except OSError as error:
            raise unreadable(self.file, error) from error
        if len(buffer):
            raise StorageError(self.file, "file-length", f"ended before {need} bytes of a tensor were read")

    def _some(self, buffer: memoryview, at: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self.descriptor, [buffer], at)
        with self._position:  # systems without positioned reads, where threads share one position
            os.lseek(self.descriptor, at, os.SEEK_SET)
            with open(self.descriptor, "rb", buffering=0, closefd=False) as stream:
                return stream.readinto(buffer) or 0


class OpenFiles:
    """The files of a checkpoint, by the names they go by; each is still the file whose header was checked."""

    def __init__(self, files: Mapping[str, Place], identities: Mapping[str, FileIdentity]) -> None:
        self._files = {file: place for file, place in files.items() if isinstance(place, Path)}
        self._remote = {file: place for file, place in files.items() if not isinstance(place, Path)}
        self._identities = identities
        self._open: dict[str, OpenFile] = {}  # the one that was used last is last
        self._lock, self._closed = Lock(), False

    def is_here(self, file: str) -> bool:
        """Whether a file is on this machine, and has a descriptor when it is open."""
        return file in self._files

    @contextmanager
    def reading(self, file: str) -> Iterator[RangeReader]:
        """The file, open; StorageError before or after if it is not what it was."""
        if file in self._remote:
            self._refuse_closed(file)
            yield self._remote[file]  # whose address always leads to the same bytes
            return
        opened = self._take(file)
        try:
            try:
                yield opened
            finally:
                self._check(file)  # afterwards, so that what was written meanwhile is seen too
        finally:
            self._give_back(opened)

    def close(self) -> None:
        """Close all files; one that a thread still reads is closed by that thread."""
        with self._lock:
            self._closed = True
            self._trim(0)

    def _take(self, file: str) -> OpenFile:
        with self._lock:
            self._refuse_closed(file)
            opened = self._open.pop(file, None)
            if opened is None:
                opened = OpenFile(open_regular(self._files[file], file), file)
                self._compare(file, os.fstat(opened.descriptor))
            self._open[file] = opened
            opened.users += 1
            return opened

    def _refuse_closed(self, file: str) -> None:
        if self._closed:
            raise StorageError(file, "closed", "read after its storage was closed")

    def _give_back(self, opened: OpenFile) -> None:
        with self._lock:
            opened.users -= 1
            self._trim(0 if self._closed else OPEN_FILES)

    def _trim(self, keep: int) -> None:
        idle = [file for file, opened in self._open.items() if not opened.users]
        for file in idle[: max(0, len(self._open) - keep)]:
            self._open.pop(file).close()

    def _check(self, file: str) -> None:
        try:
            found = os.stat(self._files[file])
        except OSError as error:
            raise StorageError(file, "no-files", f"is gone: {error.strerror or error}") from error
        self._compare(file, found)

    def _compare(self, file: str, found: os.stat_result) -> None:
        known, now = self._identities[file], FileIdentity.of(found)
        if now.size != known.size:
            raise StorageError(file, "file-length", f"had {known.size} bytes when opened, now {now.size}")
        if now != known:
            raise StorageError(
                file,
                "file-replaced",
                "was written to, or replaced by another file, since it was opened",
                remedy="open the checkpoint again",
            )
