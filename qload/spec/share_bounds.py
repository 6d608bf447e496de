"""Which share of a layer a rank's part is, for what depends on where its elements lie."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qload.spec.axis import Axis


@dataclass(frozen=True)
class ShareBounds:
    """Outputs [n0, n1) and inputs [k0, k1) of a layer of N outputs and K inputs."""

    n0: int
    n1: int
    k0: int
    k1: int
    N: int
    K: int

    @property
    def all_inputs(self) -> bool:
        """Whether every input is here."""
        return (self.k0, self.k1) == (0, self.K)

    def extent(self, axis: Axis) -> int:
        """Stored entries of an axis of all elements that are here."""
        return axis.size((self.n1 - self.n0) * (self.k1 - self.k0)) or 0

    def positions(self, axis: Axis) -> Tensor:
        """Where in the whole layer the entries here of an axis of all elements lie, int64."""
        if self.all_inputs:
            start = axis.at(self.n0 * self.K, self.N * self.K)
            return torch.arange(start, start + self.extent(axis))
        row = axis.size(self.K) or 0
        whole = torch.arange(self.N * row).reshape(self.N, row)
        return whole[self.n0 : self.n1, axis.at(self.k0, self.K) : axis.at(self.k1, self.K)].flatten()
