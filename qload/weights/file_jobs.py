"""Reading ahead by threads of the CUDA module: of a load, all that lies in files as it is wanted."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from qload.devices import CudaFileReader, file_reader
from qload.storage import SafetensorsStorage
from qload.weights.files_at_work import FilesAtWork, NativeJobs, OpenedFiles, Placed

log: logging.Logger = logging.getLogger("qload")


@dataclass(frozen=True, eq=False)
class FileJob:
    """What was asked for a load: a ticket, and the files that stay open until it was waited for."""

    owner: "FileJobs"
    ticket: int
    nbytes: int
    opened: OpenedFiles

    @cached_property
    def is_done(self) -> bool:
        """Whether all is there, once it is known: the stream that is current waits for the copies then."""
        try:
            done = self.owner.threads.wait(self.ticket)
        except RuntimeError as error:  # of the device, which no load will say again
            log.warning("reading ahead failed, each load reads for itself: %r", error)
            done = False
        done = self.owner.let_go(self) and done
        if done:
            self.owner.files.ranges.count(self.nbytes)
        return done


class FileJobs(NativeJobs):
    """What a reader of files to a device was asked and nobody has waited for."""

    def __init__(self, files: FilesAtWork, reader: CudaFileReader, home: torch.cuda.Stream) -> None:
        super().__init__(files, reader)
        self.home = home

    def read(self, placed: Sequence[Placed]) -> FileJob | None:
        """Begin to read; None where files have changed, or are too many."""
        opened = self.files.open(place.file for place, _ in placed)
        if opened is None:
            return None
        at = opened.descriptors
        asked = [(at[place.file], place.begin, place.nbytes, out.data_ptr()) for place, out in placed]
        try:
            ticket = self.threads.begin(asked, self.home)
        except BaseException:
            opened.close()
            raise
        job = FileJob(self, ticket, sum(place.nbytes for place, _ in placed), opened)
        self._begun.add(job)
        return job


def file_jobs(storage: object, home: torch.cuda.Stream) -> FileJobs | None:
    """A reader to the device of a stream; None where a storage has no files, or no thread can read them."""
    if type(storage) is not SafetensorsStorage:  # a subclass may read otherwise
        return None
    try:
        reader = file_reader(home.device)
    except RuntimeError as error:  # where no memory can be pinned
        log.warning("files are read by threads of Python: %r", error)
        return None
    return None if reader is None else FileJobs(FilesAtWork(storage.ranges), reader, home)
