"""Process groups: any object with `rank()` and `size()`, and the collectives of its ranks."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from qload.errors import ArgumentError, LostRankError, check_fields, checked


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


GROUP_REQUIREMENT = "a group of torch.distributed, or one that has {}"


class Capture(Protocol):
    """A recorded CUDA graph; it may hold communicators of a world."""

    def release(self) -> None:
        """Free the graph, so that the communicators can be destroyed."""


_captures: "weakref.WeakSet[Capture]" = weakref.WeakSet()


def register_capture(capture: Capture) -> None:
    """Release `capture` before the process group of the world is destroyed: NCCL waits for its graphs.

    Nothing is registered outside of a world.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _captures.add(capture)


def release_captures() -> None:
    """Free every registered graph."""
    for capture in list(_captures):
        capture.release()
    _captures.clear()


@runtime_checkable
class Collectives(ReducingGroup, Protocol):
    """A process group whose ranks can tell each other tensors; what each returns is the same on every rank.

    An implementer promises that, and that the tensors given stay as they are. All ranks make the same calls
    in the same order, with shapes and dtypes that are the same.
    """

    def summed(self, values: Tensor) -> Tensor:
        """The sum of all ranks' `values`, element by element, in their dtype."""

    def gathered(self, values: Tensor, dim: int = -1) -> Tensor:
        """All ranks' `values`, one after another along `dim`, in the order of ranks."""

    def first(self, values: Tensor) -> Tensor:
        """The `values` of rank 0."""


@dataclass(frozen=True)
class _OneRank(Rank):
    """A world of one, which has nobody to ask."""

    def summed(self, values: Tensor) -> Tensor:
        """The values."""
        return values

    def gathered(self, values: Tensor, dim: int = -1) -> Tensor:
        """The values."""
        return values

    def maximum(self, values: Tensor) -> Tensor:
        """The values."""
        return values

    def first(self, values: Tensor) -> Tensor:
        """The values."""
        return values


@dataclass(frozen=True, eq=False)
class _TorchCollectives(Rank):
    """A `torch.distributed.ProcessGroup`; a copy of a layer that has it asks the same group.

    torch.distributed holds the group, and this does not: a model that outlives its world would keep the
    group's threads until the interpreter ends, and a thread that then asks for the interpreter's lock aborts
    the process.
    """

    alive: "weakref.ref[torch.distributed.ProcessGroup]"

    @property
    def group(self) -> "torch.distributed.ProcessGroup":
        """The group; ArgumentError once it was destroyed."""
        found = self.alive()
        if found is None:
            raise ArgumentError("process_group", "a group that is in use", "one that was destroyed")
        return found

    def summed(self, values: Tensor) -> Tensor:
        """By `all_reduce`, whose result is the same on every rank."""
        return self._reduced(values, torch.distributed.ReduceOp.SUM)

    def maximum(self, values: Tensor) -> Tensor:
        """By `all_reduce`."""
        return self._reduced(values, torch.distributed.ReduceOp.MAX)

    def gathered(self, values: Tensor, dim: int = -1) -> Tensor:
        """By `all_gather`."""
        own = values.contiguous()
        shares = [torch.empty_like(own) for _ in range(self.world)]
        self._call(torch.distributed.all_gather, shares, own, self.group)
        return torch.cat(shares, dim)

    def first(self, values: Tensor) -> Tensor:
        """By `broadcast`."""
        told = values.clone(memory_format=torch.contiguous_format)
        self._call(torch.distributed.broadcast, told, group=self.group, group_src=0)
        return told

    def _reduced(self, values: Tensor, by: "torch.distributed.ReduceOp.RedOpType") -> Tensor:
        made = values.clone(memory_format=torch.contiguous_format)
        self._call(torch.distributed.all_reduce, made, by, self.group)
        return made

    def _call(self, collective: Callable[..., object], *arguments: object, **named: object) -> None:
        """LostRankError where a collective fails, which it does where another rank is not there for it."""
        try:
            collective(*arguments, **named)
        except RuntimeError as error:
            raise LostRankError(None, self.world, f"a collective failed: {error}") from error

    def __deepcopy__(self, memo: object) -> "_TorchCollectives":
        return self


@checked
def collectives_of(process_group: ProcessGroup) -> Collectives:
    """What the ranks of `process_group` tell each other by.

    A group of `torch.distributed` does it by its own calls, any other by its own methods, and one of a single
    rank has nobody to ask. ArgumentError where a group cannot.

    Examples
    --------
    >>> import torch
    >>> from qload import FakeWorld, collectives_of
    >>> shares = torch.tensor([[1.0, 8.0], [2.0, 4.0]])
    >>> def work(group):
    ...     ranks, mine = collectives_of(group), shares[group.rank()]
    ...     return ranks.summed(mine).tolist(), ranks.gathered(mine).tolist(), ranks.first(mine).tolist()
    >>> FakeWorld(2).run(work)[1]
    ([3.0, 12.0], [1.0, 8.0, 2.0, 4.0], [1.0, 8.0])
    """
    if isinstance(process_group, Collectives):
        return process_group
    found = _wrap_group(process_group)
    if found is None:
        can = GROUP_REQUIREMENT.format("summed, gathered, maximum and first")
        raise ArgumentError("process_group", can, type(process_group).__name__)
    return found


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
    found = _wrap_group(process_group)
    if found is None:
        raise ArgumentError(
            "process_group", GROUP_REQUIREMENT.format("maximum(values)"), type(process_group).__name__
        )
    return found.maximum


def _wrap_group(group: ProcessGroup) -> Collectives | None:
    """Of a group that has no calls of its own; None where it cannot."""
    if group.size() == 1:
        return _OneRank(group.rank(), 1)
    found = torch_group(group)
    return None if found is None else _TorchCollectives(group.rank(), group.size(), weakref.ref(found))


def torch_group(group: ProcessGroup) -> "torch.distributed.ProcessGroup | None":
    """The group of torch.distributed that `group` is, or asks as that of `joined_world` does; None."""
    if isinstance(group, _TorchCollectives):
        return group.group
    distributed = torch.distributed
    return group if distributed.is_available() and isinstance(group, distributed.ProcessGroup) else None
