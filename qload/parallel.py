"""A rank's view of its world: anything with `rank()` and `size()`, as torch.distributed's groups have.

Loads communicate nothing. A layer whose inputs are quantized by their largest value needs one reduction where
ranks have shares of its inputs: `maximum_over` finds it in a group.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier, BrokenBarrierError
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from qload.errors import ArgumentError, check_fields, checked

R = TypeVar("R")


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

    def run(self, work: Callable[[ReducingGroup], R]) -> list[R]:
        """What `work` returns for each rank: all run at once, each in a thread, and can reduce.

        The first error that a rank raises is raised.
        """
        table: list[Tensor | None] = [None] * self.world
        barrier = Barrier(self.world)

        def one(place: int) -> R:
            try:
                return work(_MeetingRank(place, self.world, table, barrier))
            except BaseException:
                barrier.abort()  # nobody waits for a rank that is gone
                raise

        with ThreadPoolExecutor(self.world) as pool:
            done = [pool.submit(one, place) for place in range(self.world)]
        errors = [error for error in (each.exception() for each in done) if error is not None]
        for error in sorted(errors, key=lambda each: isinstance(each, BrokenBarrierError)):
            raise error
        return [each.result() for each in done]


@dataclass(frozen=True, eq=False)
class _MeetingRank(Rank):
    """A rank in a thread, which meets the others at a barrier."""

    table: list[Tensor | None]
    barrier: Barrier

    def maximum(self, values: Tensor) -> Tensor:
        """The largest of all ranks' `values`, element by element."""
        self.table[self.place] = values
        self.barrier.wait()
        largest = torch.stack([each for each in self.table if each is not None]).amax(0)
        self.barrier.wait()  # before the next call writes to the table
        return largest


@dataclass(frozen=True)
class _TorchMaximum:
    """The reduction of a `torch.distributed.ProcessGroup`."""

    group: "torch.distributed.ProcessGroup"

    def __call__(self, values: Tensor) -> Tensor:
        """The largest of all ranks' values; those given stay as they are."""
        largest = values.clone()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, self.group)
        return largest

    def __deepcopy__(self, memo: object) -> "_TorchMaximum":
        """A copy of a layer reduces over the same group."""
        return self


@checked
def maximum_over(process_group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """What makes largest values those of all ranks of `process_group`, for `Weight.get_linear`.

    A group of `torch.distributed` reduces as it is, any other by its own `maximum`, and one of a single
    rank has nothing to reduce. ArgumentError where a group cannot.

    Examples
    --------
    >>> import torch
    >>> from qload import FakeWorld, maximum_over
    >>> shares = torch.tensor([[1.0, 8.0], [2.0, 4.0]])
    >>> FakeWorld(2).run(lambda group: maximum_over(group)(shares[group.rank()]).tolist())
    [[2.0, 8.0], [2.0, 8.0]]
    """
    if isinstance(process_group, ReducingGroup):
        return process_group.maximum
    if process_group.size() == 1:
        return lambda values: values
    distributed = torch.distributed
    if distributed.is_available() and isinstance(process_group, distributed.ProcessGroup):
        return _TorchMaximum(process_group)
    raise ArgumentError(
        "process_group",
        "a group of torch.distributed, or one that has maximum(values)",
        type(process_group).__name__,
    )


ALONE = Rank(0, 1)
