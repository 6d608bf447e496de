"""Reading ahead: threads read what a load will ask for, while the one before it is repacked.

A piece that cannot be read is left out, without an error: the load then reads it itself, and says what is
wrong in its own words.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from qload import native
from qload.storage import FillingStorage, WeightStorage
from qload.storage.protocol import bounds
from qload.weights.landing import DEVICE_RUN, Landing, Piece, landing_on

THREADS = 4  # that read at most: more of them wait for each other

LEAST = 4 << 20  # bytes of a tensor that several threads read

Key = tuple[str, tuple[tuple[int, int], ...]]  # a stored name, and (start, stop) of every dimension


@dataclass(frozen=True)
class Ahead:
    """Tensors that are being read, by what was asked for; each is handed out once."""

    landing: Landing
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    pending: dict[Key, list["Future[Any]"]] = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> int:
        """Of all tensors that were to be read; first asked for before one is handed out."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def take(self, storage: WeightStorage, name: str, index: tuple[slice, ...]) -> Tensor | None:
        """What was read ahead of these elements, once it is there; None where nothing was."""
        if not self.tensors:
            return None
        key = name, bounds(name, storage.info(name).shape, index)
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
        futures = self.pending.pop(key)
        done = [future for future in futures if not future.cancelled() and future.exception() is None]
        for future in done:
            self.landing.wait(future.result(), tensor)
        return len(done) == len(futures)


class ReaderAhead:
    """Threads that read from a storage to a device. A context manager, which waits for them."""

    def __init__(self, storage: FillingStorage, device: torch.device, run: int = DEVICE_RUN) -> None:
        self.storage: FillingStorage = storage
        self.landing: Landing = landing_on(device, run)
        most = THREADS if device.type == "cuda" else min(THREADS, native.threads())
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="qload-read")

    def __enter__(self) -> "ReaderAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.landing.close()

    def begin(self, asked: Iterable[tuple[str, tuple[slice, ...]]], storage: WeightStorage) -> Ahead:
        """Begin to read these elements of stored tensors."""
        ahead = Ahead(self.landing)
        pieces: dict[Key, list[Piece]] = {}
        for name, index in asked:
            info = storage.info(name)
            pairs = bounds(name, info.shape, index)
            extents = [stop - start for start, stop in pairs]
            longest = prod(extents[1:]) * info.dtype.itemsize  # of its rows, which have to fit in a buffer
            if 0 in extents or longest > self.landing.run or (name, pairs) in pieces:
                continue
            out = self.landing.new(extents, info.dtype)
            pieces[name, pairs] = list(
                _runs(Piece(name, tuple(slice(*pair) for pair in pairs), out), self.landing.run)
            )
            ahead.tensors[name, pairs] = out
        self._submit(ahead, pieces)
        return ahead

    def _submit(self, ahead: Ahead, pieces: dict[Key, list[Piece]]) -> None:
        ready = self.landing.ready()
        for job in _jobs([(key, run) for key, runs in pieces.items() for run in runs], self.landing.run):
            future = self._threads.submit(self.landing.fill, self.storage, [run for _, run in job], ready)
            for key in dict.fromkeys(key for key, _ in job):
                ahead.pending.setdefault(key, []).append(future)


def read_onto(storage: WeightStorage, name: str, index: tuple[slice, ...], device: torch.device) -> Tensor:
    """Elements of a stored tensor on a device: by several threads where there are many of them."""
    if device.type == "cuda" and isinstance(storage, FillingStorage):
        pairs = bounds(name, storage.info(name).shape, index)
        size = prod(stop - start for start, stop in pairs) * storage.info(name).dtype.itemsize
        if size > LEAST:
            with ReaderAhead(storage, device, size // THREADS + 1) as reader:
                tensor = reader.begin([(name, index)], storage).take(storage, name, index)
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
