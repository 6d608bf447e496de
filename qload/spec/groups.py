"""Groups of inputs that share a scale, where a config says how many rows a group has."""

from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from qload.errors import ArgumentError


class Grouped:
    """A config with a `group_size`; -1: one group for all rows."""

    name: ClassVar[str]
    group_size: int

    def check_group_size(self) -> None:
        """Refuses a group size that is neither -1 nor at least 1: ArgumentError."""
        if self.group_size != -1 and self.group_size < 1:
            raise ArgumentError(f"{self.name}: group_size", "-1 or at least 1", str(self.group_size))

    def check_bits(self, bits: int, *allowed: int) -> None:
        """Refuses `bits` that are none of those `allowed`: ArgumentError."""
        if bits not in allowed:
            raise ArgumentError(f"{self.name}: bits", " or ".join(map(str, allowed)), str(bits))

    def one_group(self, K: int) -> Self:
        """This config for a layer of `K` inputs: a group that covers them all is -1 from here on."""
        config: Any = self  # a frozen dataclass, as every config is
        whole: Self = replace(config, group_size=-1) if self.group_size == K else self
        return whole

    def rows_of_a_group(self, K: int) -> int:
        """How many rows share a scale; the last group of `K` rows may be short."""
        return max(K, 1) if self.group_size == -1 else self.group_size

    def groups(self, K: int) -> int:
        """How many groups `K` rows have."""
        return 1 if self.group_size == -1 else -(-K // self.group_size)

    def in_order(self, K: int, device: torch.device | None = None) -> Tensor:
        """The group of each row on `device`, int64 (`K`,), where groups follow each other."""
        rows = min(self.rows_of_a_group(K), max(K, 1))  # a config may say more than an int64 holds
        return torch.arange(K, device=device) // rows
