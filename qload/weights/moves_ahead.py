"""Elements that threads of the CPU module move, or read, from their files before it is their layer's turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qload.devices import CpuFileMover, FileMove, file_mover, has_routines
from qload.loader.source import AskedMove
from qload.sentences import Digit
from qload.storage import FileRange, SafetensorsStorage
from qload.weights.files_at_work import FilesAtWork, NativeJobs, OpenedFiles, Placed
from qload.weights.in_file import ElementsInFile


@dataclass(frozen=True, eq=False)
class BegunMoves:
    """Moves that were begun together, and the files that stay open until they were waited for."""

    owner: "MovesAhead"
    ticket: int
    sizes: Sequence[int]  # bytes
    opened: OpenedFiles

    @cached_property
    def made(self) -> Sequence[bool]:
        """Of each move whether it was made; what the target of another holds is nothing."""
        mover: CpuFileMover = self.owner.threads
        made = mover.wait(self.ticket)
        if not self.owner.let_go(self) or len(made) < len(self.sizes):
            return [False for _ in self.sizes]
        for size, done in zip(self.sizes, made, strict=True):
            self.owner.files.ranges.count(size if done else 0)
        return made

    @property
    def is_done(self) -> bool:
        """Whether all of them were made."""
        return all(self.made)


class MovesAhead(NativeJobs):
    """What threads of the CPU module were asked that read a storage's files, and nobody has waited for."""

    def begin(self, asked: Sequence[AskedMove]) -> BegunMoves | None:
        """Begin to move; None where files have changed or are too many, or targets are no memory."""
        return self._begin([(_place(elements), target, bits, to) for elements, target, bits, to in asked])

    def read(self, placed: Sequence[Placed]) -> BegunMoves | None:
        """Begin to read as it lies there what goes to targets in one piece; None likewise."""
        return self._begin([(place, target, 8, ()) for place, target in placed])

    def _begin(self, asked: Sequence[tuple[FileRange, Tensor, int, Sequence[Digit]]]) -> BegunMoves | None:
        able = self.threads.is_here and has_routines(*(target for _, target, _, _ in asked))
        opened = self.files.open(place.file for place, _, _, _ in asked) if able else None
        if opened is None:
            return None
        at, mover = opened.descriptors, self.threads
        moves = [
            FileMove((at[place.file], place.begin, place.nbytes), target, bits, digits)
            for place, target, bits, digits in asked
        ]
        try:
            ticket = mover.begin(moves)
        except BaseException:
            opened.close()
            raise
        begun = BegunMoves(self, ticket, [place.nbytes for place, _, _, _ in asked], opened)
        self._begun.add(begun)
        return begun


def _place(elements: object) -> FileRange:
    assert isinstance(elements, ElementsInFile)
    return elements.place


def moves_ahead(storage: object, device: torch.device, threads: int) -> MovesAhead | None:
    """A mover to memory of the CPU; None where a storage has no files, or no thread can read them so."""
    if type(storage) is not SafetensorsStorage or device.type != "cpu":  # a subclass may read otherwise
        return None
    mover = file_mover(threads)
    return None if mover is None else MovesAhead(FilesAtWork(storage.ranges), mover)
