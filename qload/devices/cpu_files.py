"""The CPU module reads a file in pieces, and moves each from a cache to where it belongs."""

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qload.devices.cpu import has_routines
from qload.devices.large_pages import in_large_pages
from qload.native import isa, load, threads
from qload.sentences import Digit

PIECE = 2 << 20  # bytes of memory of each thread, of which it fills as many at once as stay in its caches

ALIGNED = 64  # bytes at whose multiples the memory of each thread begins


def move_from_file(source: tuple[int, int, int], target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
    """target[digits] = source[digits], for elements of `bits` bits that lie in both.

    `source`: of an open file the descriptor, where the elements begin, and their bytes. False where this was
    not done; what `target` holds then is nothing.
    """
    cpu, many = load("cpu").found, threads()
    if cpu is None or not has_routines(target):
        return False
    piece = min(PIECE, -(-source[2] // ALIGNED) * ALIGNED)
    scratch = in_large_pages(torch.empty(many * piece, dtype=torch.uint8, device="cpu"))
    at = target.data_ptr(), scratch.data_ptr()
    done: bool = cpu.move_from_file(isa(), bits, list(digits), source, *at, piece, many)
    return done


class FileMove(NamedTuple):
    """Elements of `bits` bits, by digits, of an open file's (descriptor, begin, bytes) to a target.

    Without digits bytes are read as they lie there.
    """

    source: tuple[int, int, int]
    target: Tensor
    bits: int
    digits: Sequence[Digit]


class CpuFileMover:
    """Threads of the CPU module that move elements from files, without Python's lock.

    Parameters
    ----------
    module
        The CPU module.
    scratch
        Memory of the threads, `PIECE` bytes for each.
    """

    def __init__(self, module: Any, scratch: Tensor) -> None:
        self._mover = module.FileMover(isa(), scratch.data_ptr(), PIECE, scratch.nbytes // PIECE)
        self._scratch = scratch  # which goes after the threads that use it
        self._targets: dict[int, list[Tensor]] = {}  # of tickets that threads write to
        self._asked: list[list[Tensor]] = []  # of tickets that are not known yet

    @property
    def is_here(self) -> bool:
        """Whether this process has the threads, which a copy of it by fork has not."""
        return bool(self._mover.is_here)

    def begin(self, moves: Sequence[FileMove]) -> int:
        """Begin to move, to new memory on the CPU: a ticket to wait for, once. Only where they are here."""
        asked = [(bits, list(to), source, target.data_ptr()) for source, target, bits, to in moves]
        targets = [target for _, target, _, _ in moves]
        self._asked.append(targets)
        ticket: int = self._mover.begin(asked)
        self._targets[ticket] = self._asked.pop()
        return ticket

    def wait(self, ticket: int) -> list[bool]:
        """Of each move of a ticket whether it was made; what the target of another holds is nothing.

        Empty where nobody knows any more: in a copy of the process, and where a wait was interrupted before.
        """
        made: list[bool] = []
        if self.is_here and ticket in self._targets:
            with suppress(ValueError):  # which was waited for, and then came an interrupt
                made = self._mover.wait(ticket)
        self._targets.pop(ticket, None)
        return made

    def close(self) -> None:
        """Drop what no thread has begun, and wait for all else: after that no memory is written to."""
        if self.is_here:
            self._mover.close()
        self._targets.clear()
        self._asked.clear()


def file_mover(threads: int) -> CpuFileMover | None:
    """Threads that move elements from files to memory of the CPU; None where none can."""
    scratch = in_large_pages(torch.empty(threads * PIECE, dtype=torch.uint8, device="cpu"))
    if not hasattr(os, "pread") or not has_routines(scratch):
        return None
    return CpuFileMover(load("cpu").found, scratch)
