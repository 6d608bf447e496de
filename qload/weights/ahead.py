"""Reading ahead: threads read what a load will ask for, while the one before it is repacked.

A piece that cannot be read is left out, without an error: the load then reads it itself, and says what is
wrong in its own words.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from qload import native
from qload.errors import QloadError
from qload.storage import FillingStorage, WeightStorage
from qload.storage.file_reads import Bounds
from qload.storage.protocol import bounds
from qload.weights.file_jobs import FileJob, FileJobs, file_jobs
from qload.weights.landing import DEVICE_RUN, CudaLanding, Landing, Piece, Wanted, landing_on
from qload.weights.moves_ahead import BegunMoves, MovesAhead, moves_ahead

log: logging.Logger = logging.getLogger("qload")

THREADS = 4  # that read to memory of the CPU: more of them wait for each other
DEVICE_THREADS = 8  # that read for a device, and ask Python for little

LEAST = 4 << 20  # bytes of a tensor that several threads read

Index = tuple[slice, ...]
Key = tuple[str, tuple[tuple[int | None, int | None], ...]]  # a stored name, and (start, stop) as asked for


@dataclass(frozen=True, eq=False)
class Job:
    """What a thread is asked: to fill some pieces of a load."""

    landing: Landing
    future: "Future[Any]"

    @cached_property
    def is_done(self) -> bool:
        """Whether the pieces are there, once it is known: the stream that is current waits for them then."""
        error = CancelledError() if self.future.cancelled() else self.future.exception()
        if error is None:
            self.landing.wait(self.future.result())
        elif not isinstance(error, QloadError | CancelledError):  # which no load will say again
            log.warning("reading ahead failed, each load reads for itself: %r", error)
        return error is None


@dataclass(frozen=True)
class Ahead:
    """Tensors that are being read, by what was asked for; each is handed out once, on one stream."""

    landing: Landing
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    jobs: dict[Key, list[Job | FileJob | BegunMoves]] = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> int:
        """Of all tensors that were to be read; first asked for before one is handed out."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def take(self, name: str, index: Index) -> Tensor | None:
        """What was read ahead of these elements, once it is there; None where nothing was."""
        key = _key(name, index)
        tensor = self.tensors.pop(key, None)
        if tensor is None:
            return None
        return tensor if self._is_read(key, tensor) else None

    def close(self) -> None:
        """Wait for what nobody asked for."""
        while self.tensors:
            self._is_read(*self.tensors.popitem())

    def _is_read(self, key: Key, tensor: Tensor) -> bool:
        """Wait for all reads of a tensor: whether each of them was done."""
        done = [job.is_done for job in self.jobs.pop(key)]
        self.landing.hand_out(tensor)
        return all(done)


class ReaderAhead:
    """Threads that read from a storage to a device. A context manager, which waits for them."""

    def __init__(self, storage: FillingStorage, device: torch.device, run: int = DEVICE_RUN) -> None:
        self.storage: FillingStorage = storage
        self.landing: Landing = landing_on(device, run)
        self._files = file_jobs(storage, self.landing.home) if isinstance(self.landing, CudaLanding) else None
        most = DEVICE_THREADS if device.type == "cuda" else min(THREADS, native.threads())
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="qload-read")
        self.moves: MovesAhead | None = moves_ahead(storage, device, most)

    def __enter__(self) -> "ReaderAhead":
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as ending:  # the last one first, whatever one of them raises
            ending.callback(self.landing.close)
            for natively in (self.moves, self._files):
                if natively is not None:
                    ending.callback(natively.close)
            ending.callback(self._threads.shutdown, wait=True, cancel_futures=True)

    def begin(self, asked: Iterable[tuple[str, Index]], storage: WeightStorage) -> Ahead:
        """Begin to read these elements of stored tensors."""
        wanted: dict[Key, tuple[Bounds, Wanted]] = {}
        for name, index in asked:
            info = storage.info(name)
            pairs = bounds(name, info.shape, index)
            extents = tuple(stop - start for start, stop in pairs)
            if 0 not in extents:
                wanted[_key(name, index)] = pairs, (extents, info.dtype)
        ahead = Ahead(self.landing)
        if wanted:
            made = self.landing.new(each for _, each in wanted.values())
            ahead.tensors.update(zip(wanted, made, strict=True))
            rest = {key: pairs for key, (pairs, _) in wanted.items()}
            natively = self._files or self.moves
            self._submit(ahead, rest if natively is None else _from_files(natively, ahead, rest))
        return ahead

    def _submit(self, ahead: Ahead, wanted: Mapping[Key, Bounds]) -> None:
        run = self.landing.run
        pieces = {
            key: Piece(key[0], tuple(slice(*pair) for pair in pairs), ahead.tensors[key])
            for key, pairs in wanted.items()
        }
        fitting = [(key, piece) for key, piece in pieces.items() if piece.row <= run]
        for key in pieces.keys() - dict(fitting).keys():  # of which no row fits in a buffer
            del ahead.tensors[key]
        ready = self.landing.ready() if fitting else None
        for work in _jobs([(key, one) for key, piece in fitting for one in _runs(piece, run)], run):
            each = [piece for _, piece in work]
            job = Job(self.landing, self._threads.submit(self.landing.fill, self.storage, each, ready))
            for key in dict.fromkeys(key for key, _ in work):
                ahead.jobs.setdefault(key, []).append(job)


def _from_files(
    files: FileJobs | MovesAhead, ahead: Ahead, wanted: Mapping[Key, Bounds]
) -> Mapping[Key, Bounds]:
    """Begin to read what lies in files as it is wanted: what is left for threads of Python."""
    places = {key: files.files.ranges.of(key[0], pairs) for key, pairs in wanted.items()}
    placed = {key: (place, ahead.tensors[key]) for key, place in places.items() if place is not None}
    job = files.read(list(placed.values())) if placed else None
    if job is None:
        return wanted
    ahead.jobs.update({key: [job] for key in placed})
    return {key: pairs for key, pairs in wanted.items() if key not in placed}


def _key(name: str, index: Index) -> Key:
    return name, tuple((piece.start, piece.stop) for piece in index)


def read_onto(storage: WeightStorage, name: str, index: tuple[slice, ...], device: torch.device) -> Tensor:
    """Elements of a stored tensor on a device: by several threads where there are many of them."""
    if device.type == "cuda" and isinstance(storage, FillingStorage):
        pairs = bounds(name, storage.info(name).shape, index)
        size = prod(stop - start for start, stop in pairs) * storage.info(name).dtype.itemsize
        if size > LEAST:
            with ReaderAhead(storage, device, size // THREADS + 1) as reader:
                tensor = reader.begin([(name, index)], storage).take(name, index)
            if tensor is not None:
                return tensor
    return storage.read(name, index).to(device)


def _runs(piece: Piece, most: int) -> Iterator[Piece]:
    """A piece in runs of its first dimension that fit in a buffer."""
    if not piece.out.ndim or piece.room <= most:
        yield piece
        return
    first, rows = piece.index[0].start, piece.out.shape[0]
    step = max(1, most // (piece.out.nbytes // rows))
    for at in range(0, rows, step):
        end = min(at + step, rows)
        yield replace(piece, index=(slice(first + at, first + end), *piece.index[1:]), out=piece.out[at:end])


def _jobs(pieces: Sequence[tuple[Key, Piece]], most: int) -> Iterator[list[tuple[Key, Piece]]]:
    """Pieces in groups that fit in a buffer, so that small ones cost no thread a call each."""
    job: list[tuple[Key, Piece]] = []
    room = 0
    for key, piece in pieces:
        if job and room + piece.room > most:
            yield job
            job, room = [], 0
        job.append((key, piece))
        room += piece.room
    if job:
        yield job
