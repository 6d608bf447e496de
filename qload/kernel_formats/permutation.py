"""Rows that a kernel reads in another order than the layer has them."""

from typing import TypeVar

import torch
from torch import Tensor

from qload.layouts import PackedCodes

R = TypeVar("R", Tensor, PackedCodes)


def put_back(rows: R, perm: Tensor | None) -> R:
    """Row i goes to place perm[i]; None: they are in order."""
    if perm is None:
        return rows
    moved = rows[inverse(perm)]
    assert isinstance(moved, type(rows))  # packed codes are put back before they are turned
    return moved


def inverse(perm: Tensor) -> Tensor:
    """The permutation that undoes another; same dtype."""
    back = torch.empty_like(perm)
    back[perm.long()] = torch.arange(perm.numel(), dtype=perm.dtype, device=perm.device)
    return back
