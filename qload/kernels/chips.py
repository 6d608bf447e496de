"""Properties of a layer's device, and moves between devices."""

from collections.abc import Callable

import torch
from torch import Tensor

ANY_CHIP = 256  # multiprocessors; none has as many, and a layer on the CPU may move to one
LEAST_SHARED = 99 << 10  # bytes of shared memory of a block, on chips of capability 8.6, 8.9 and 12.x


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; for other devices, more than any has."""
    if device.type != "cuda":
        return ANY_CHIP
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of a block on a CUDA device; for other devices, the least of all chips."""
    if device.type != "cuda":
        return LEAST_SHARED
    return int(
        getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LEAST_SHARED)
    )


def compute_capability(device: torch.device) -> int | None:
    """Compute capability of a CUDA device, times 10; None for other devices."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def uncast(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a function for `nn.Module._apply` without its casts: `.half()` must not round a float32 scale."""

    def move(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

    return move
