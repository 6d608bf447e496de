"""What the kernels on Marlin's tiles share: which calls none of them takes, and how one is launched."""

from typing import Any

import torch
from torch import Tensor

from qload.kernels.cuda.module import native, pointer, stream

ALIGNED = 16  # bytes that are loaded at once
HOPPER = 9


def why_not_hopper(device: torch.device) -> str | None:
    """Why no kernel of Hopper's own instructions runs on a device, or None."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != HOPPER:
        return f"needs a device of capability {HOPPER}.0, got {major}.{minor}"
    return None if native().hopper else "the CUDA module was built without QLOAD_CUDA_ARCHS=90a"


def why_not(call: Any, looks_up: bool = False) -> str | None:
    """Why kernels cannot read a weight as it lies, or None; `looks_up`: they read the group of each row."""
    if not (call.is_k_full or looks_up):
        return "rows of a permuted group are missing here, and it counts groups by their size"
    if any(pointer(tensor) % ALIGNED for tensor in (call.weights, call.scales, call.zeros)):
        return f"loads from multiples of {ALIGNED} bytes, the weight starts between two"
    return None


def launch(
    routine: str, call: Any, x: Tensor, indices: tuple[Tensor | None, ...], kind: tuple[int, ...], *how: int
) -> Tensor:
    """y (M, N) of a routine of the module; `indices`, `kind`: what it takes beside what all take."""
    y: Tensor = x.new_empty(x.shape[0], call.N)
    read = x, call.weights, call.scales, call.zeros, *indices, call.bias, y
    sizes = [x.shape[0], call.rows, call.columns, x.shape[1], call.N]
    with torch.cuda.device(x.device):
        run = getattr(native(), routine)
        run(*map(pointer, read), sizes, *kind, x.dtype == torch.bfloat16, *how, call.early, stream(x))
    return y
