"""Rows that a kernel reads in another order than the layer has them."""

import torch
from torch import Tensor


def put_back(rows: Tensor, perm: Tensor | None) -> Tensor:
    """Row i goes to place perm[i]; None: they are in order."""
    return rows if perm is None else rows[inverse(perm)]


def inverse(perm: Tensor) -> Tensor:
    """The permutation that undoes another; same dtype."""
    back = torch.empty_like(perm)
    back[perm.long()] = torch.arange(perm.numel(), dtype=perm.dtype, device=perm.device)
    return back
