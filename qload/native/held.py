"""Codes that are not spelled out as numbers, and what a code means: what a fused dequantize needs to know."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)  # what is a tensor by another name has no memory of its own
OUT = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # what values are rounded to


@dataclass(frozen=True)
class Meaning:
    """w[n, k] = (value of code[n, k] - zero) * scale * factor, or by the scale, in this order in float32.

    scales, zeros: float32 (R, G), row n_group[n] or n * R / N, column k_group[k] or k / run. `lookup`: the
    value of each code, float32; None: the code itself. Indices are int32.
    """

    scales: Tensor
    zeros: Tensor | None
    lookup: Tensor | None
    n_group: Tensor | None
    k_group: Tensor | None
    run: int
    divide: bool
    factor: float

    def tensors(self) -> Sequence[Tensor]:
        """All whose memory is read."""
        every = (self.scales, self.zeros, self.lookup, self.n_group, self.k_group)
        return [tensor for tensor in every if tensor is not None]


class Held(Protocol):
    """Integer codes (R, C), still packed."""

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C)."""

    @property
    def T(self) -> "Tensor | Held":
        """(C, R)."""

    def __getitem__(self, rows: Tensor) -> "Tensor | Held":
        """Row i is row rows[i]."""

    def plain(self) -> Tensor:
        """The codes as numbers, int32 or uint8 (R, C)."""

    def dequantize(self, meaning: Meaning, out: Tensor) -> bool:
        """What the codes mean, in one pass from the words to `out`; False where nothing was done."""


def plain(codes: Tensor | Held) -> Tensor:
    """Codes as numbers, whether they still lie in words or not."""
    return codes if isinstance(codes, Tensor) else codes.plain()
