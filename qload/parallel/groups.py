"""What a process group is: anything with `rank()` and `size()`, as torch.distributed's groups have."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from qload.errors import ArgumentError, check_fields


@runtime_checkable
class ProcessGroup(Protocol):
    """What qload asks of a process group. `torch.distributed.ProcessGroup` answers as it is.

    An implementer promises that `rank` and `size` never change, and that the other processes of the group
    answer with the same size and the other ranks. Loads communicate nothing through it.
    """

    def rank(self) -> int:
        """This process' place, 0 <= rank < size."""

    def size(self) -> int:
        """How many processes share the layers."""


@runtime_checkable
class ReducingGroup(ProcessGroup, Protocol):
    """A process group that can reduce by the maximum, which `maximum_over` takes.

    An implementer promises that all ranks call it as often, with shapes and dtypes that are the same.
    """

    def maximum(self, values: Tensor) -> Tensor:
        """The largest of all ranks' `values`, element by element, the same on every rank."""


@dataclass(frozen=True)
class Rank:
    """One rank of a world, without any process behind it."""

    place: int
    world: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.place < self.world:
            raise ArgumentError("process_group", f"0 <= rank < size = {self.world}", f"rank {self.place}")

    def rank(self) -> int:
        """This rank's place."""
        return self.place

    def size(self) -> int:
        """The world's size."""
        return self.world


ALONE = Rank(0, 1)
