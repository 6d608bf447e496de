"""Sums over the ranks of a machine by memory of each GPU that the others write to.

Short and middle messages take one kernel, which every rank launches in the same order. It waits for the other
ranks on the device; a CUDA graph may hold it.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from qload.devices.cuda import module, on_device, runs_on, stream
from qload.devices.tensors import address
from qload.errors import ArgumentError

SUMMED = (torch.float16, torch.bfloat16)
RUN = 8  # numbers that are read together
ALIGNMENT = 16  # bytes
MAX_NORM_SIZE = 1 << 15  # numbers of a row of a norm


class PeerSums:
    """Sums of 16-bit tensors over the ranks of a machine; each rank has a GPU of its own.

    Every rank makes the same calls in the same order, with equal shapes and dtypes.

    Parameters
    ----------
    native
        `PeerMemory` of the CUDA module, connected to those of the other ranks.
    device
        GPU of this rank.
    """

    def __init__(self, native: Any, device: torch.device) -> None:
        self._native, self.device = native, device
        self._is_open, self._lock = True, Lock()

    def takes(self, values: Tensor) -> bool:
        """Return whether a kernel sums such tensors; the same on every rank."""
        if torch.compiler.is_compiling() or not self._is_open or values.device != self.device:
            return False
        if values.dtype not in SUMMED or (torch.is_grad_enabled() and values.requires_grad):
            return False
        numbers = values.numel()
        return numbers > 0 and numbers % RUN == 0 and values.nbytes <= self._native.message_bytes

    def summed(self, values: Tensor) -> Tensor | None:
        """Sum `values` over all ranks, in the order of ranks and rounded once; None: no kernel."""
        if not self.takes(values):
            return None
        y = torch.empty_like(values, memory_format=torch.contiguous_format)
        self._launch(values, (None, None), None, y, (1, values.numel()), 0.0)
        return y

    def summed_and_normed(
        self, values: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return x plus the sum of `values` (..., H) over all ranks, and its RMS norm; None: no kernel.

        `weight` (H,), `eps`: of the norm.
        """
        size = weight.shape[0]
        alike = all(each.dtype == values.dtype and each.device == values.device for each in (x, weight))
        if not (alike and self.takes(values)) or x.shape != values.shape or values.shape[-1] != size:
            return None
        rows = values.numel() // size
        if size % RUN or size > MAX_NORM_SIZE or rows > self._native.most_rows:
            return None
        total, y = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        self._launch(values, (x, weight), total, y, (rows, size), eps)
        return total, y

    def _launch(
        self,
        values: Tensor,
        norm: tuple[Tensor | None, Tensor | None],
        total: Tensor | None,
        y: Tensor,
        sizes: tuple[int, int],
        eps: float,
    ) -> None:
        read = [None if each is None else _aligned(each) for each in (values, *norm)]
        with on_device(self.device):
            is_bfloat16 = values.dtype == torch.bfloat16
            self._native.sum(*map(address, (*read, total, y)), sizes, eps, is_bfloat16, stream(values))

    def stop(self) -> None:
        """End kernels that wait for a lost rank, from any thread; their results are undefined."""
        with self._lock:
            if self._is_open:
                self._native.stop()

    def close(self) -> None:
        """Free the memory, once all ranks have ended their kernels."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._native.close()


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


class OwnPeerMemory:
    """Memory of this rank before its connection to the other ranks.

    RuntimeError or ArgumentError where the machine has no such memory.

    Parameters
    ----------
    rank, world
        This rank, and the number of ranks.
    device
        GPU of this rank.
    """

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        found = module()
        if found is None or not hasattr(found, "PeerMemory") or not runs_on(found, device):
            raise ArgumentError("qload", "a build with CUDA for this GPU", "none")
        if world > found.PeerMemory.most_ranks:
            raise ArgumentError("world", f"at most {found.PeerMemory.most_ranks} ranks", str(world))
        self.device = device
        with on_device(device):
            self._native = found.PeerMemory(rank, world)
            self.handle: bytes = self._native.handle()

    def connect(self, handles: Sequence[bytes]) -> PeerSums:
        """Open the memory of all ranks by their handles; RuntimeError where a GPU cannot."""
        with on_device(self.device):
            self._native.connect([*handles])
        return PeerSums(self._native, self.device)

    def close(self) -> None:
        """Free the memory."""
        self._native.close()
