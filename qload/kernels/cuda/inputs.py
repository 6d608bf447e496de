"""What a kernel reads, as it takes it: x in the order of the weight's rows, from addresses it can load."""

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from qload.kernels.cuda.module import pointer

ALIGNED = 16  # bytes that are loaded at once


def in_rows(call: Any, multiple: int) -> Tensor:
    """x (M, K) in the order of the weight's rows, K a multiple; zeros where the layer has no input."""
    x: Tensor = call.x
    if call.perm is not None:
        return pad(x, (0, call.rows - x.shape[1])).index_select(1, call.perm)
    return pad(x, (0, call.rows - x.shape[1])) if x.shape[1] % multiple else x


def why_not_aligned(call: Any) -> str | None:
    """Why kernels cannot load a weight's tensors, or None."""
    if any(pointer(tensor) % ALIGNED for tensor in (call.weights, call.scales, call.zeros)):
        return f"loads from multiples of {ALIGNED} bytes, the weight starts between two"
    return None
