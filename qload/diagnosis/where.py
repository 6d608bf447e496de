"""Where numbers are wrong: which outputs, inputs, groups, ranks and experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qload.diagnosis.case import Case

Range = tuple[int, int]  # the first, and one past the last


@dataclass(frozen=True)
class Where:
    """How many numbers are wrong, of how many, and between which bounds; None where that is not known."""

    wrong: int
    total: int
    n: Range | None = None
    k: Range | None = None
    group: Range | None = None
    rank: Range | None = None
    expert: Range | None = None
    outputs: int = 0  # how many have something wrong
    inputs: int = 0

    def bounds(self) -> dict[str, Range]:
        """Those that are known, by what they count."""
        named = {
            "experts": self.expert,
            "ranks": self.rank,
            "outputs": self.n,
            "inputs": self.k,
            "groups": self.group,
        }
        return {name: bound for name, bound in named.items() if bound is not None}


def where_of(case: Case, wrong: Tensor) -> Where:
    """The bounds of what is wrong, bool (N, K); experts and ranks lie one after another along N or K."""
    rows, columns = (torch.nonzero(wrong.any(axis)).flatten() for axis in (1, 0))
    count, total = int(wrong.sum()), wrong.numel()
    if not count:
        return Where(0, total)
    group = None
    codes = case.matrix
    if codes is not None and codes.k_group is not None and codes.scales.shape[1] > 1:
        group = _range(codes.k_group[columns])
    expert = None
    N = wrong.shape[0]
    if case.experts > 1:
        N //= case.experts
        expert, rows = _range(rows // N), rows % N
    rank = None if case.rank is None else (case.rank, case.rank + 1)
    if rank is None and case.world > 1 and N % case.world == 0:
        rank = _range(rows // (N // case.world))
    counts = len({*rows.tolist()}), int(columns.numel())
    return Where(count, total, _range(rows + case.first), _range(columns), group, rank, expert, *counts)


def _range(places: Tensor) -> Range:
    return int(places.min()), int(places.max()) + 1
