"""Files that stay open while threads of a native module read them, which are told descriptors alone.

Whoever asks looks after the files, before and after.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Protocol

from torch import Tensor

from qload.errors import QloadError
from qload.storage import FileRange, FileRanges

OPEN_FILES = 16  # at once, of which a load may need several

Placed = tuple[FileRange, Tensor]  # bytes of a file, and where they go, in one piece


class OpenedFiles:
    """Descriptors by the names of files, to be closed once nobody reads them."""

    def __init__(self, owner: "FilesAtWork", descriptors: Mapping[str, int], opened: ExitStack) -> None:
        self.owner, self.descriptors, self._opened = owner, descriptors, opened
        self._is_open = True

    def close(self) -> bool:
        """Close them: whether the files are still what they were, which is told once."""
        if not self._is_open:  # whoever asked before was interrupted
            return False
        self._is_open = False
        self.owner.let_go(self.descriptors)
        try:
            self._opened.close()
        except QloadError:
            return False
        return True


class FilesAtWork:
    """The files of a storage that are open for others, of which there are only so many."""

    def __init__(self, ranges: FileRanges) -> None:
        self.ranges = ranges
        self._used: dict[str, int] = {}  # by how many

    def open(self, files: Iterable[str]) -> OpenedFiles | None:
        """None where files are no more what they were, or are too many."""
        names = dict.fromkeys(files)
        if len(self._used.keys() | names.keys()) > OPEN_FILES:
            return None
        with suppress(QloadError), ExitStack() as opened:
            descriptors = {file: opened.enter_context(self.ranges.descriptor(file)) for file in names}
            for file in names:
                self._used[file] = self._used.get(file, 0) + 1
            return OpenedFiles(self, descriptors, opened.pop_all())
        return None

    def let_go(self, files: Iterable[str]) -> None:
        """One less uses each of these."""
        for file in files:
            self._used[file] -= 1
            if not self._used[file]:
                del self._used[file]


class BegunJob(Protocol):
    """What was asked of native threads, and the files that stay open until it was waited for."""

    @property
    def opened(self) -> OpenedFiles:
        """The files."""


class NativeJobs:
    """What native `threads` were asked that read a storage's `files`, and nobody has waited for."""

    def __init__(self, files: FilesAtWork, threads: Any) -> None:
        self.files, self.threads = files, threads
        self._begun = set[BegunJob]()

    def let_go(self, job: BegunJob) -> bool:
        """Close what a job that is over has read: whether those files are still what they were."""
        self._begun.discard(job)
        return job.opened.close()

    def close(self) -> None:
        """Wait for the threads; what nobody waited for is dropped."""
        try:
            self.threads.close()
        finally:
            for job in list(self._begun):
                self.let_go(job)
