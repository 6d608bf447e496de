"""Distribution of per-layer work over the threads of a process and the ranks of a process group."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from qload.errors import ArgumentError, LostRankError
from qload.lazy_torch import is_imported, torch
from qload.native import modules
from qload.parallel import ALONE, ProcessGroup
from qload.parallel.process_group import torch_group

T = TypeVar("T")
ByteProgress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True)
class Workers:
    """Threads of this process, and a group of processes that all call the same methods."""

    threads: int
    group: ProcessGroup

    @classmethod
    def of(cls, group: ProcessGroup | None) -> Workers:
        """Use as many threads as native code may; `group`: of torch.distributed, or None for one process."""
        group = ALONE if group is None else group
        if group.size() > 1 and torch_group(group) is None:
            raise ArgumentError("process_group", "None, or a group of torch.distributed", repr(group))
        return cls(modules.threads(), group)

    def run(
        self,
        work: Callable[[int], T],
        sizes: Sequence[int],
        progress: ByteProgress,
        max_threads: int | None = None,
    ) -> list[T]:
        """Return work(0), work(1), ... in order, the same in every process.

        `sizes`: bytes of each item. `max_threads`: a limit for items that need much memory.
        """
        mine = {at: sizes[at] for at in self.share(range(len(sizes)))}
        done = self._run_here(work, mine, progress, min(self.threads, max_threads or self.threads))
        everything = {at: result for part in self.gather(done) for at, result in part.items()}
        return [everything[at] for at in range(len(sizes))]

    @property
    def is_first(self) -> bool:
        """True in rank 0, which does the work that is done once."""
        return self.group.rank() == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's share of items."""
        return items[self.group.rank() :: self.group.size()]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, once all ranks have called it."""
        world = self.group.size()
        if world == 1:
            return [value]
        values: list[Any] = [None] * world
        try:
            torch.distributed.all_gather_object(values, value, group=torch_group(self.group))
        except RuntimeError as error:
            raise LostRankError(None, world, f"a collective failed: {error}") from error
        return values

    def _run_here(
        self, work: Callable[[int], T], sizes: dict[int, int], progress: ByteProgress, threads: int
    ) -> dict[int, T]:
        """Do this rank's share on its threads; exceptions reach the caller."""
        total, done_bytes = sum(sizes.values()), 0
        progress(0, total)
        if len(sizes) == 1:  # a thread would take longer to start than the work
            (at,) = sizes
            with torch_threads(1):
                done = {at: _run_one(work, at)}
            progress(total, total)
            return done
        # Threads with several torch threads each would wait for each other: one torch thread each.
        pool = ThreadPoolExecutor(threads, "qload-verify", _use_one_thread)
        with torch_threads(None):
            try:
                tasks: dict[Future[T], int] = {
                    pool.submit(contextvars.copy_context().run, _run_one, work, at): at for at in sizes
                }
                for task in as_completed(tasks):
                    task.result()
                    done_bytes += sizes[tasks[task]]
                    progress(done_bytes, total)
            finally:
                pool.shutdown(cancel_futures=True)  # an interrupt does not wait for tasks in the queue
        return {at: task.result() for task, at in tasks.items()}


def _use_one_thread() -> None:
    if is_imported():
        torch.set_num_threads(1)


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Set the number of torch's threads for one operation, and restore it; nothing before its import."""
    if not is_imported():
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_one(work: Callable[[int], T], at: int) -> T:
    """Do one item with one native thread: the threads of the pool already use all cores."""
    with modules.one_thread():
        return work(at)
