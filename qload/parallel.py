"""A rank's view of its world: anything with `rank()` and `size()`, as torch.distributed's groups have."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from qload.errors import ArgumentError, check_fields


@runtime_checkable
class ProcessGroup(Protocol):
    """What qload asks of a process group. `torch.distributed.ProcessGroup` answers as it is.

    An implementer promises that `rank` and `size` never change, and that the other processes of the group
    answer with the same size and the other ranks. Nothing is ever communicated through it.
    """

    def rank(self) -> int:
        """This process' place, 0 <= rank < size."""

    def size(self) -> int:
        """How many processes share the layers."""


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


@dataclass(frozen=True)
class FakeWorld:
    """All the ranks of a world in one process: `for group in FakeWorld(4): ...`.

    ArgumentError for a world of no ranks.

    Attributes
    ----------
    world
        How many ranks there are.

    Examples
    --------
    >>> import torch
    >>> from qload import FakeWorld, MemoryStorage, Weights, loader_from_config
    >>> storage = MemoryStorage({"up.weight": torch.arange(8.0).reshape(4, 2)})
    >>> shares = [
    ...     Weights(storage, loader=loader_from_config(None), process_group=group).get_weights_col("up")
    ...     for group in FakeWorld(2)
    ... ]
    >>> torch.cat([share.dequantize() for share in shares]).equal(storage.read("up.weight"))
    True
    """

    world: int

    def __post_init__(self) -> None:
        check_fields(self)
        if self.world < 1:
            raise ArgumentError("world", "at least 1", str(self.world))

    def __iter__(self) -> Iterator[Rank]:
        return (Rank(place, self.world) for place in range(self.world))

    def __len__(self) -> int:
        return self.world


ALONE = Rank(0, 1)
