"""x as a kernel that reads whole rows of a weight in Marlin's order, 16 bytes at a time, takes it."""

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from qload.kernels.cuda.launch import ALIGNED
from qload.kernels.cuda.module import pointer


def in_rows(call: Any, multiple: int) -> Tensor:
    """x (M, K) in the order of the weight's rows, K a multiple; zeros where the layer has no input."""
    x: Tensor = call.x
    if call.perm is not None:
        return pad(x, (0, call.rows - x.shape[1])).index_select(1, call.perm)
    if x.shape[1] % multiple:
        return pad(x, (0, call.rows - x.shape[1]))
    return x.clone() if pointer(x) % ALIGNED else x
