"""All ranks of a world in one process, for tests: one after another, or in parallel threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from qload.errors import ArgumentError, check_fields
from qload.parallel.process_group import Collectives, Rank

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

    def __deepcopy__(self, memo: object) -> "_ThreadRank":
        return self
