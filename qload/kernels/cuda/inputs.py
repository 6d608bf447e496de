"""x as kernels take it whose weight has rows in another order than its inputs, or reads 16 bytes at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qload.kernels.cuda.launch import ALIGNED
from qload.kernels.cuda.module import native, pointer, stream

GATHERED = 2  # tokens from which on x is put in order ahead of a kernel that could read it out of order
STAGED = 4  # tokens from which on that goes by way of shared memory


def in_rows(call: Any, multiple: int) -> Tensor:
    """x (M, K) in the order of the weight's rows, K a multiple; zeros where the layer has no input."""
    x: Tensor = call.x
    if call.perm is not None:
        return gathered(x, call.perm, call.early)
    if x.shape[1] % multiple:
        return pad(x, (0, call.rows - x.shape[1]))
    return x.clone() if pointer(x) % ALIGNED else x


def gathered(x: Tensor, perm: Tensor, early: bool = True, staged: bool | None = None) -> Tensor:
    """x (M, K) of 16 bits -> (M, rows): column i is input perm[i], zeros where there is none; rows % 8 == 0."""
    M, rows = x.shape[0], perm.shape[0]
    perm = perm.clone() if pointer(perm) % ALIGNED else perm
    y: Tensor = x.new_empty(M, rows)
    way = M >= STAGED if staged is None else staged
    with torch.cuda.device(x.device):
        native().gather(*map(pointer, (x, perm, y)), [M, x.shape[1], rows], way, early, stream(x))
    return y


def ahead(call: Any) -> tuple[Tensor, Tensor | None]:
    """x and perm for a kernel that can read x by perm itself, which is only faster for a single token."""
    if call.perm is None or call.tokens < GATHERED or call.perm.shape[0] % 8:
        return call.x, call.perm
    return gathered(call.x, call.perm, call.early), None
