"""Where a layer is far from its reference: a grid of its parts, with a digit for the error of each."""

from dataclasses import dataclass

import torch
from torch import Tensor

GRID = 16  # parts of an axis
LEVELS = 9  # each twice as far from the reference as the one before; the last from its own size on
MATRIX = 2  # axes of what has a map


@dataclass(frozen=True)
class LayerMap:
    """The map of a layer, as text: how far all of it is from the reference, and a row of digits for each part
    of its outputs, with one for each part of its inputs.

    0 stands where both are equal, 9 where the error is as large as the reference, or larger; each step
    between them halves it. "" where there is nothing to draw.
    """

    layer: str
    text: str


class ErrorMap:
    """The squares of errors and of the reference, part by part, of a layer (N, K)."""

    def __init__(self, N: int, K: int) -> None:
        self.N, self.K = N, K
        self._squares = torch.zeros(2, min(GRID, N), min(GRID, K))  # of the error, and of the reference
        self._columns = torch.arange(K) * self._squares.shape[2] // max(1, K)
        self._drawn = bool(self._squares.numel())

    def add(self, start: int, got: Tensor, want: Tensor) -> None:
        """A run of outputs from `start` on, and what the reference has there; only matrices are drawn."""
        self._drawn = self._drawn and want.ndim == MATRIX
        if not self._drawn:
            return
        rows = (torch.arange(len(want)) + start) * self._squares.shape[1] // self.N
        for into, values in zip(self._squares, (got.float() - want.float(), want.float()), strict=True):
            across = torch.zeros(len(want), into.shape[1]).index_add_(1, self._columns, values.square())
            into.index_add_(0, rows, across)

    def text(self) -> str:
        """As `LayerMap` has it; nothing added: both are equal."""
        if not self._drawn:
            return ""
        error, norm = self._squares
        whole = float((error.sum() / norm.sum()).sqrt()) if error.any() else 0.0
        lines = ("".join(map(str, row)) for row in _levels(error, norm).tolist())
        return f"{whole:.4g}: {' '.join(lines)}"


def _levels(error: Tensor, norm: Tensor) -> Tensor:
    """The digits of a map; what is no number is as far as can be."""
    share = torch.where(error == 0, 0.0, (error / norm).sqrt())
    level = (LEVELS + share.log2().floor()).clamp(1, LEVELS).nan_to_num(LEVELS)
    return torch.where(share == 0, 0.0, level).to(torch.int64)
