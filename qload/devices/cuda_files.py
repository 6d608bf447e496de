"""Files to a CUDA device, by threads of the module, which never ask for Python's lock."""

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qload.devices.cuda_current import on_device, stream_on

log: logging.Logger = logging.getLogger("qload")

RUN = 4 << 20  # bytes that a thread reads at once: what is copied next is still in a cache
THREADS = 8

DeviceRange = tuple[int, int, int, int]  # a descriptor, a position, bytes, and an address of the device


class CudaFileReader:
    """Threads that read ranges of files into pinned memory, and copy them to a device on their own streams.

    Parameters
    ----------
    module
        The CUDA module.
    device
        By its number.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self.device = device
        self._memory = pinned(THREADS * module.FileReader.buffers * RUN)
        with on_device(device):
            self._reader = module.FileReader(self._memory.data_ptr(), RUN, THREADS)

    def begin(self, ranges: Sequence[DeviceRange], home: torch.cuda.Stream) -> int:
        """Begin to read, to memory that is new on the stream at `home`: a ticket to wait for, once."""
        with on_device(self.device):
            ticket: int = self._reader.begin(ranges, home.cuda_stream)
        return ticket

    def wait(self, ticket: int) -> bool:
        """Whether all ranges of a ticket could be read; the stream that is current waits for the copies.

        RuntimeError where the device failed.
        """
        with on_device(self.device):
            place, number, told = self._reader.wait(ticket, stream_on(self.device))
        if told:
            raise RuntimeError(f"range {place} of ticket {ticket} could not be copied: {told}")
        if place >= 0:
            reason = os.strerror(number) if number else "the file ended"
            log.debug("range %d of ticket %d was not read: %s", place, ticket, reason)
        return bool(place < 0)

    def close(self) -> None:
        """Drop what no thread has begun, and wait for all else: after that no memory is written to."""
        self._reader.close()


def pinned(nbytes: int) -> Tensor:
    """Memory of the host that devices copy from by themselves."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
