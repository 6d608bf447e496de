"""Where bytes land that threads read ahead: straight in memory of the CPU, or through it on a CUDA device."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, cycle
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qload.devices import copy_from_host, in_large_pages, stream_on
from qload.storage import AskedBytes, FillingStorage

HOST_RUN = 4 << 20  # bytes that a thread reads at once, so that several share a tensor
DEVICE_RUN = 16 << 20  # more, as each asks Python for much, and threads of Python work in turns
BUFFERS = 2  # of a thread: one is copied from while the other is filled
ALIGNED = 64  # bytes at whose multiples tensors begin in a buffer


Wanted = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor


@dataclass(frozen=True)
class Piece:
    """Elements of a stored tensor, in one piece, and where they go."""

    name: str
    index: tuple[slice, ...]
    out: Tensor

    @property
    def room(self) -> int:
        """The bytes that it takes in a buffer."""
        return -(-self.out.nbytes // ALIGNED) * ALIGNED

    @property
    def row(self) -> int:
        """The bytes of one entry of its first dimension, which are read at once."""
        return prod(self.out.shape[1:]) * self.out.itemsize


class Landing(Protocol):
    """A place for tensors that any number of threads fill, each at most `run` bytes at once."""

    run: int

    def new(self, wanted: Iterable[Wanted]) -> list[Tensor]:
        """Tensors to be filled."""

    def ready(self) -> Any:
        """What says that tensors which are new by now may be written to."""

    def fill(self, storage: FillingStorage, pieces: Sequence[Piece], ready: Any) -> Any:
        """Read pieces, of `run` bytes together at most, in a thread; what says when they are there."""

    def wait(self, filled: Any) -> None:
        """What was filled may be used after this, on the stream that is current."""

    def hand_out(self, tensor: Tensor) -> None:
        """The stream that is current uses a tensor from now on."""

    def close(self) -> None:
        """No thread fills any more: what was new here may be given back once this returns."""


class HostLanding:
    """The memory of the CPU: a thread reads straight to where the tensor stays."""

    run: int = HOST_RUN

    def new(self, wanted: Iterable[Wanted]) -> list[Tensor]:
        """In large pages, as to be given fresh memory costs more than to fill it."""
        return [in_large_pages(torch.empty(extents, dtype=dtype, device="cpu")) for extents, dtype in wanted]

    def ready(self) -> None:
        """At once."""

    def fill(self, storage: FillingStorage, pieces: Sequence[Piece], ready: None) -> None:
        """Read them."""
        _read(storage, pieces, [piece.out.reshape(-1).view(torch.uint8).numpy() for piece in pieces])

    def wait(self, filled: None) -> None:
        """What was read is there."""

    def hand_out(self, tensor: Tensor) -> None:
        """As it is."""

    def close(self) -> None:
        """Nothing to wait for."""


class _Buffer:
    """Memory of the host that the device copies from by itself, and the last such copy."""

    def __init__(self, size: int, stream: torch.cuda.Stream) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.memory.numpy()
        self.stream = stream
        self.copied: torch.cuda.Event = stream.record_event()


class CudaLanding:
    """A CUDA device: each thread reads into buffers of its own, which it copies on a stream of its own.

    Memory of the device is asked for on the stream of whoever began, and copies wait for what that stream did
    with this memory before.
    """

    def __init__(self, device: torch.device, run: int) -> None:
        self.home: torch.cuda.Stream = torch.cuda.current_stream(device)
        self.device: torch.device = self.home.device  # by its number: each thread has a current one
        self.run: int = run
        self._own, self._streams = threading.local(), list[torch.cuda.Stream]()

    def new(self, wanted: Iterable[Wanted]) -> list[Tensor]:
        """On the device."""
        with nullcontext() if self._is_at_home() else torch.cuda.stream(self.home):
            return [torch.empty(extents, dtype=dtype, device=self.device) for extents, dtype in wanted]

    def ready(self) -> torch.cuda.Event:
        """When the stream at home has done all that it was asked for until now."""
        event: torch.cuda.Event = self.home.record_event()
        return event

    def fill(
        self, storage: FillingStorage, pieces: Sequence[Piece], ready: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Read them into a buffer, and ask for the copies: when these are done."""
        buffer, starts = next(self._buffers()), list(accumulate((piece.room for piece in pieces), initial=0))
        buffer.copied.synchronize()  # of what it held before
        places = [slice(at, at + piece.out.nbytes) for at, piece in zip(starts, pieces, strict=False)]
        _read(storage, pieces, [buffer.bytes[place] for place in places])
        buffer.stream.wait_event(ready)
        copy_from_host(buffer.memory, places, [piece.out for piece in pieces], buffer.stream)
        buffer.copied = buffer.stream.record_event()
        return buffer.copied

    def wait(self, filled: torch.cuda.Event) -> None:
        """The stream that is current waits for the copies, and the host does not."""
        torch.cuda.current_stream(self.device).wait_event(filled)

    def hand_out(self, tensor: Tensor) -> None:
        """Its memory is not given to others before the stream that is current has used it."""
        if not self._is_at_home():
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Wait for every copy, which neither reads nor writes memory any more that is given back."""
        for stream in self._streams:
            stream.synchronize()

    def _is_at_home(self) -> bool:
        return stream_on(self.device) == self.home.cuda_stream

    def _buffers(self) -> Iterator[_Buffer]:
        found: Iterator[_Buffer] | None = getattr(self._own, "buffers", None)
        if found is None:
            torch.cuda.set_device(self.device)  # of this thread, which does nothing else
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            found = cycle([_Buffer(self.run, stream) for _ in range(BUFFERS)])
            self._own.buffers = found
            self._streams.append(stream)
        return found


def _read(storage: FillingStorage, pieces: Sequence[Piece], memory: Sequence[NDArray[np.uint8]]) -> None:
    """The bytes of each piece to memory, in one call where the storage knows how."""
    read_all: Callable[[list[AskedBytes]], None] | None = getattr(storage, "read_bytes_into", None)
    if read_all is not None:
        read_all([(piece.name, piece.index, row) for piece, row in zip(pieces, memory, strict=True)])
        return
    for piece, row in zip(pieces, memory, strict=True):
        out = torch.from_numpy(row).view(piece.out.dtype).view(piece.out.shape)
        storage.read_into(piece.name, piece.index, out)


def landing_on(device: torch.device, run: int = DEVICE_RUN) -> Landing:
    """Where tensors are read to for a device; on others than CUDA devices the caller moves them there.

    `run`: what a thread reads at once for a CUDA device.
    """
    return CudaLanding(device, run) if device.type == "cuda" else HostLanding()
