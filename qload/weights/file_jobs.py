"""Reading ahead by threads of the CUDA module: of a load, all that lies in files as it is wanted.

Files are opened, and looked after before and after, by who asks; the threads are told descriptors alone.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qload.devices import CudaFileReader, file_reader
from qload.errors import QloadError
from qload.storage import FileRange, FileRanges, SafetensorsStorage

log: logging.Logger = logging.getLogger("qload")

OPEN_FILES = 16  # at once, of which a load may need several

Placed = tuple[FileRange, Tensor]  # bytes of a file, and where they go, in one piece


@dataclass(frozen=True, eq=False)
class FileJob:
    """What was asked for a load: a ticket, and the files that stay open until it was waited for."""

    owner: "FileJobs"
    ticket: int
    nbytes: int
    files: tuple[str, ...]
    opened: ExitStack

    @cached_property
    def is_done(self) -> bool:
        """Whether all is there, once it is known: the stream that is current waits for the copies then."""
        try:
            done = self.owner.reader.wait(self.ticket)
        except RuntimeError as error:  # of the device, which no load will say again
            log.warning("reading ahead failed, each load reads for itself: %r", error)
            done = False
        done = self.owner.let_go(self) and done
        if done:
            self.owner.ranges.count(self.nbytes)
        return done


class FileJobs:
    """A reader of files to a device, and what it was asked for and nobody has waited for."""

    def __init__(self, ranges: FileRanges, reader: CudaFileReader, home: torch.cuda.Stream) -> None:
        self.ranges, self.reader, self.home = ranges, reader, home
        self._begun = set[FileJob]()
        self._files: dict[str, int] = {}  # that are open, and for how many jobs

    def begin(self, placed: Sequence[Placed]) -> FileJob | None:
        """Begin to read; None where the files are no more what they were, or are too many."""
        files = tuple(dict.fromkeys(place.file for place, _ in placed))
        if len(self._files.keys() | files) > OPEN_FILES:
            return None
        with suppress(QloadError), ExitStack() as opened:
            at = {file: opened.enter_context(self.ranges.descriptor(file)) for file in files}
            asked = [(at[place.file], place.begin, place.nbytes, out.data_ptr()) for place, out in placed]
            nbytes = sum(place.nbytes for place, _ in placed)
            job = FileJob(self, self.reader.begin(asked, self.home), nbytes, files, opened.pop_all())
            self._begun.add(job)
            for file in files:
                self._files[file] = self._files.get(file, 0) + 1
            return job
        return None

    def let_go(self, job: FileJob) -> bool:
        """Close what a job that is over has read: whether those files are still what they were."""
        self._begun.discard(job)
        for file in job.files:
            self._files[file] -= 1
            if not self._files[file]:
                del self._files[file]
        try:
            job.opened.close()
        except QloadError:
            return False
        return True

    def close(self) -> None:
        """Wait for the threads and their copies; what nobody waited for is dropped."""
        try:
            self.reader.close()
        finally:
            for job in list(self._begun):
                self.let_go(job)


def file_jobs(storage: object, home: torch.cuda.Stream) -> FileJobs | None:
    """A reader to the device of a stream; None where a storage has no files, or no thread can read them."""
    if type(storage) is not SafetensorsStorage:  # a subclass may read otherwise
        return None
    try:
        reader = file_reader(home.device)
    except RuntimeError as error:  # where no memory can be pinned
        log.warning("files are read by threads of Python: %r", error)
        return None
    return None if reader is None else FileJobs(storage.ranges, reader, home)
