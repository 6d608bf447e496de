"""Process groups: any object with `rank()` and `size()`, and the collectives of its ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Barrier, BrokenBarrierError
from typing import Protocol, TypeVar, runtime_checkable

from qload import devices
from qload.errors import ArgumentError, LostRankError, check_fields, checked
from qload.lazy_torch import Tensor, torch

GROUP_REQUIREMENT = "a group of torch.distributed, or one with {}"


@runtime_checkable
class ProcessGroup(Protocol):
    """A rank's view of a process group; `torch.distributed.ProcessGroup` is one.

    Implementers promise that `rank` and `size` never change, and that the ranks of a group are 0 to size - 1.
    Loads never communicate through a group.
    """

    def rank(self) -> int:
        """Return the rank of this process, 0 <= rank < size."""

    def size(self) -> int:
        """Return the number of processes."""


@runtime_checkable
class ReducingGroup(ProcessGroup, Protocol):
    """A process group with a reduction by the maximum, for `maximum_over`.

    All ranks make the same calls, with equal shapes and dtypes.
    """

    def maximum(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of `values` over all ranks, equal on every rank."""


@runtime_checkable
class Collectives(ReducingGroup, Protocol):
    """A process group with collectives; their results are equal on every rank.

    All ranks make the same calls in the same order, with equal shapes and dtypes. Implementers leave the
    input tensors unchanged.
    """

    def summed(self, values: Tensor) -> Tensor:
        """Return the elementwise sum of `values` over all ranks, in their dtype."""

    def gathered(self, values: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the `values` of all ranks along `dim`, in the order of ranks."""

    def first(self, values: Tensor) -> Tensor:
        """Return the `values` of rank 0."""


@dataclass(frozen=True)
class Rank:
    """A rank of a world without a process, for loads of one share."""

    place: int
    world: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.place < self.world:
            raise ArgumentError("process_group", f"0 <= rank < size = {self.world}", f"rank {self.place}")

    def rank(self) -> int:
        """Return this rank."""
        return self.place

    def size(self) -> int:
        """Return the size of the world."""
        return self.world


ALONE = Rank(0, 1)


class Capture(Protocol):
    """A recorded CUDA graph that may hold communicators of a world."""

    def release(self) -> None:
        """Free the graph, so the communicators can be destroyed."""


_captures: weakref.WeakSet[Capture] = weakref.WeakSet()


def register_capture(capture: Capture) -> None:
    """Register a graph for release before the world's process group is destroyed: NCCL waits for its graphs.

    Outside of a world nothing is registered.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _captures.add(capture)


def release_captures() -> None:
    """Free every registered graph."""
    for capture in list(_captures):
        capture.release()
    _captures.clear()


@dataclass(frozen=True)
class _OneRank(Rank):
    """A world of one rank: every collective returns its input."""

    def gathered(self, values: Tensor, dim: int = -1) -> Tensor:
        """Return the values."""
        return values

    summed = maximum = first = gathered


@dataclass(frozen=True, eq=False)
class _TorchCollectives(Rank):
    """Collectives of a `torch.distributed.ProcessGroup`; a deep copy shares the group.

    The reference to the group is weak. A model that outlives its world would otherwise keep the group's
    threads until the interpreter ends, and a thread that then requests the interpreter's lock aborts the
    process.
    """

    alive: weakref.ref[torch.distributed.ProcessGroup]
    peers: devices.PeerSums | None = None  # of GPUs that write to each other's memory

    @property
    def group(self) -> torch.distributed.ProcessGroup:
        """The group; ArgumentError after its destruction."""
        group = self.alive()
        if group is None:
            raise ArgumentError("process_group", "an active group", "a destroyed group")
        return group

    def summed(self, values: Tensor) -> Tensor:
        """Sum by a kernel of connected GPUs, or by `all_reduce`, with equal results on every rank."""
        found = None if self.peers is None else self.peers.summed(values)
        return self._reduce(values, torch.distributed.ReduceOp.SUM) if found is None else found

    def maximum(self, values: Tensor) -> Tensor:
        """Reduce by `all_reduce`."""
        return self._reduce(values, torch.distributed.ReduceOp.MAX)

    def gathered(self, values: Tensor, dim: int = -1) -> Tensor:
        """Concatenate by `all_gather`."""
        own = values.contiguous()
        shares = [torch.empty_like(own) for _ in range(self.world)]
        self._call(torch.distributed.all_gather, shares, own, self.group)
        return torch.cat(shares, dim)

    def first(self, values: Tensor) -> Tensor:
        """Copy from rank 0 by `broadcast`."""
        result = values.clone(memory_format=torch.contiguous_format)
        self._call(torch.distributed.broadcast, result, group=self.group, group_src=0)
        return result

    def _reduce(self, values: Tensor, operation: torch.distributed.ReduceOp.RedOpType) -> Tensor:
        result = values.clone(memory_format=torch.contiguous_format)
        self._call(torch.distributed.all_reduce, result, operation, self.group)
        return result

    def _call(self, collective: Callable[..., object], *arguments: object, **named: object) -> None:
        """Call a collective; LostRankError if it fails, because another rank is missing."""
        try:
            collective(*arguments, **named)
        except RuntimeError as error:
            raise LostRankError(None, self.world, f"a collective failed: {error}") from error

    def __deepcopy__(self, memo: object) -> _TorchCollectives:
        return self


def with_peers(ranks: Collectives, peers: devices.PeerSums | None) -> Collectives:
    """Return the collectives of a group of torch.distributed whose sums use connected GPUs."""
    return replace(ranks, peers=peers) if isinstance(ranks, _TorchCollectives) else ranks


def summed_and_normed(
    ranks: Collectives, values: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor] | None:
    """Return x plus the sum of `values` (..., H) over `ranks`, and its RMS norm, from one kernel.

    None without such a kernel. `weight` (H,), `eps`: of the norm. The sum has the bits of `ranks.summed`.
    """
    peers = ranks.peers if isinstance(ranks, _TorchCollectives) else None
    return None if peers is None else peers.summed_and_normed(values, x, weight, eps)


@checked
def collectives_of(process_group: ProcessGroup) -> Collectives:
    """Return the collectives of `process_group`.

    A group of `torch.distributed` uses its own calls, any other group its own methods, and a single rank
    needs none. ArgumentError for a group without collectives.

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
    collectives = _wrap_group(process_group)
    if collectives is None:
        expected = GROUP_REQUIREMENT.format("summed, gathered, maximum and first")
        raise ArgumentError("process_group", expected, type(process_group).__name__)
    return collectives


@checked
def maximum_over(process_group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return a function for the maximum over all ranks of `process_group`, for `Weight.get_linear`.

    A group of `torch.distributed` uses its own calls, any other group its `maximum`, and a single rank needs
    none. ArgumentError for a group without a maximum.

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
    collectives = _wrap_group(process_group)
    if collectives is None:
        expected = GROUP_REQUIREMENT.format("maximum(values)")
        raise ArgumentError("process_group", expected, type(process_group).__name__)
    return collectives.maximum


def _wrap_group(group: ProcessGroup) -> Collectives | None:
    """Return the collectives of one rank, or of a group of torch.distributed; None for any other group."""
    if group.size() == 1:
        return _OneRank(group.rank(), 1)
    known = torch_group(group)
    return None if known is None else _TorchCollectives(group.rank(), group.size(), weakref.ref(known))


def torch_group(group: ProcessGroup) -> torch.distributed.ProcessGroup | None:
    """Return the group of torch.distributed behind `group`, or None."""
    if isinstance(group, _TorchCollectives):
        return group.group
    distributed = torch.distributed
    return group if distributed.is_available() and isinstance(group, distributed.ProcessGroup) else None


R = TypeVar("R")


@dataclass(frozen=True)
class FakeWorld:
    """All ranks of a world in one process: `for group in FakeWorld(4): ...`.

    ArgumentError for a world without ranks.

    Attributes
    ----------
    world
        Number of ranks.

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
        return (Rank(rank, self.world) for rank in range(self.world))

    def __len__(self) -> int:
        return self.world

    def run(self, work: Callable[[Collectives], R]) -> list[R]:
        """Run `work` on all ranks in parallel threads with `Collectives`, and return the result of each rank.

        An error of a rank is raised; of several errors the first one.
        """
        table: list[Tensor | None] = [None] * self.world
        barrier = Barrier(self.world)

        def run_rank(rank: int) -> R:
            try:
                return work(_ThreadRank(rank, self.world, table, barrier))
            except BaseException:
                barrier.abort()  # the other ranks wait for this one
                raise

        with ThreadPoolExecutor(self.world) as pool:
            futures = [pool.submit(run_rank, rank) for rank in range(self.world)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]


@dataclass(frozen=True, eq=False)
class _ThreadRank(Rank):
    """A rank in a thread; collectives exchange tensors through a table, between two barriers."""

    table: list[Tensor | None]
    barrier: Barrier

    def maximum(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks."""
        return self._exchange(values, lambda tensors: torch.stack(tensors).amax(0))

    def summed(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over all ranks."""
        return self._exchange(values, lambda tensors: torch.stack(tensors).sum(0, dtype=values.dtype))

    def gathered(self, values: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the `values` of all ranks."""
        return self._exchange(values, lambda tensors: torch.cat(tensors, dim))

    def first(self, values: Tensor) -> Tensor:
        """Return the `values` of rank 0."""
        return self._exchange(values, lambda tensors: tensors[0].clone())

    def _exchange(self, values: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Collect the tensors of all ranks and combine them; ArgumentError for different shapes or dtypes."""
        self.table[self.place] = values
        self.barrier.wait()
        tensors = [tensor for tensor in self.table if tensor is not None]
        kinds = {f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors}
        if len(kinds) > 1:
            raise ArgumentError(
                "values", "tensors of one shape and dtype on all ranks", ", ".join(sorted(kinds))
            )
        result = combine(tensors)
        self.barrier.wait()  # before a rank changes its tensor, or the next call writes to the table
        return result

    def __deepcopy__(self, memo: object) -> _ThreadRank:
        return self
