"""What codes mean: scales, zero points and groups, as data that every device's dequantize takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


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

    def of_rows(self, rows: slice) -> "Meaning":
        """That of some rows."""
        if self.n_group is not None:
            return replace(self, n_group=self.n_group[rows])
        if self.scales.shape[0] == 1:
            return self
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, scales=self.scales[rows], zeros=zeros)

    def tensors(self) -> Sequence[Tensor]:
        """All whose memory is read."""
        every = (self.scales, self.zeros, self.lookup, self.n_group, self.k_group)
        return [tensor for tensor in every if tensor is not None]


@dataclass(frozen=True)
class ZeroRule:
    """How a field of a zero-point word is read: ((word + add_to_word) >> field) + add, then masked."""

    add_to_word: int = 0
    add: int = 0
    mask: int = -1


def group_runs(group: Tensor | None, K: int) -> tuple[int, Tensor | None]:
    """(rows of a group, None) where groups follow each other, else (1, the group of each row)."""
    if group is None or not group.numel():
        return K, None
    if group.is_cuda:  # whose values would have to be waited for
        return 1, group.to(torch.int32)
    run = run_of(group)
    return (run, None) if run else (1, group.to(torch.int32))


def run_of(group: Tensor) -> int:
    """How many rows a group has, where groups of one size follow each other, else 0; waits for a device."""
    if group.is_meta:
        return 0
    run = int((group == 0).sum()) or 1
    return run if bool((group == torch.arange(group.numel(), device=group.device) // run).all()) else 0
