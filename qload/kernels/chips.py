"""Properties of a layer's device, and moves between devices."""

from collections.abc import Callable

import torch
from torch import Tensor

ANY_CHIP = 256  # multiprocessors; none has as many, and a layer on the CPU may move to one


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; for other devices, more than any has."""
    if device.type != "cuda":
        return ANY_CHIP
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
