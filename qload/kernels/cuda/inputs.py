"""x as kernels take it: in the order of a weight's rows, in whole pieces of 16 bytes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qload.kernels.cuda.launch import ALIGNED
from qload.kernels.cuda.module import native, pointer, stream

STAGED = 32  # tokens from which on inputs are put in order by way of shared memory


def in_rows(call: Any, multiple: int) -> Tensor:
    """x (M, K) in the order of the weight's rows, padded with zeros to a multiple of inputs."""
    x = in_order(call)
    if x.shape[1] % multiple:
        return pad(x, (0, call.rows - x.shape[1]))
    return x.clone() if pointer(x) % ALIGNED else x


def in_order(call: Any) -> Tensor:
    """x (M, K), or (M, rows) for a weight with an order of rows."""
    x: Tensor = call.x
    return x if call.perm is None else gathered(x, call.perm, call.early)


def gathered(x: Tensor, perm: Tensor, early: bool = True, staged: bool | None = None) -> Tensor:
    """x (M, K) of 16 bits -> (M, rows): column i is input perm[i], or zeros for an index beyond K.

    Rows are a multiple of 8. `staged`: by way of shared memory; None: where that is faster.
    """
    M, rows = x.shape[0], perm.shape[0]
    if pointer(perm) % ALIGNED:
        perm, early = perm.clone(), False  # else it would be read before it is made
    y: Tensor = x.new_empty(M, rows)
    way = M >= STAGED if staged is None else staged
    with torch.cuda.device(x.device):
        native().gather_inputs(*map(pointer, (x, perm, y)), [M, x.shape[1], rows], way, early, stream(x))
    return y
