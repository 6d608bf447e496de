"""All the ranks of a world in one process, for tests: one after another, or at once in threads that meet."""

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

    def run(self, work: Callable[[Collectives], R]) -> list[R]:
        """What `work` returns for each rank: all run at once, each in a thread, and have `Collectives`.

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
        return self._met(values, lambda brought: torch.stack(brought).amax(0))

    def summed(self, values: Tensor) -> Tensor:
        """The sum of all ranks' `values`."""
        return self._met(values, lambda brought: torch.stack(brought).sum(0, dtype=values.dtype))

    def gathered(self, values: Tensor, dim: int = -1) -> Tensor:
        """All ranks' `values`, one after another."""
        return self._met(values, lambda brought: torch.cat(brought, dim))

    def first(self, values: Tensor) -> Tensor:
        """The `values` of rank 0."""
        return self._met(values, lambda brought: brought[0].clone())

    def _met(self, values: Tensor, made: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """What is made of all that the ranks have brought to this meeting."""
        self.table[self.place] = values
        self.barrier.wait()
        brought = [each for each in self.table if each is not None]
        told = {f"{each.dtype} {tuple(each.shape)}" for each in brought}
        if len(told) > 1:  # of which processes would make nonsense
            raise ArgumentError("values", "tensors alike on all ranks", ", ".join(sorted(told)))
        result = made(brought)
        self.barrier.wait()  # before a rank changes what it brought, or the next call writes to the table
        return result

    def __deepcopy__(self, memo: object) -> "_MeetingRank":
        """A copy of a layer meets the same ranks."""
        return self
