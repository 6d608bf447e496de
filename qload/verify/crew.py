"""Who shares work on layers: threads of a process, and processes of a group with the same task."""

import contextvars
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed

from qload.errors import ArgumentError, LostRankError
from qload.native import modules
from qload.parallel import ALONE, ProcessGroup
from qload.parallel.process_group import torch_group

T = TypeVar("T")
Tell = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True)
class Crew:
    """Threads of this process, and the group of processes, each of which has to ask for the same work."""

    threads: int
    group: ProcessGroup = ALONE

    @classmethod
    def of(cls, group: ProcessGroup | None) -> "Crew":
        """As many threads as native code may use; a group of torch.distributed, or None: one process."""
        group = ALONE if group is None else group
        if group.size() > 1 and torch_group(group) is None:
            raise ArgumentError("process_group", "None, or a group of torch.distributed", repr(group))
        return cls(modules.threads(), group)

    def share_out(
        self, work: Callable[[int], T], sizes: Sequence[int], tell: Tell, most: int | None = None
    ) -> list[T]:
        """work(0), work(1), ..., done by whoever is free, in order and the same in every process.

        `sizes`: the bytes that each looks at. `most`: threads, where each needs much memory.
        """
        mine = {at: sizes[at] for at in self.share(range(len(sizes)))}
        done = self._here(work, mine, tell, min(self.threads, most or self.threads))
        everything = {at: made for each in self.told(done) for at, made in each.items()}
        return [everything[at] for at in range(len(sizes))]

    @property
    def first(self) -> bool:
        """Whether this is the first process, which does what is done once."""
        return self.group.rank() == 0

    def share(self, things: Sequence[T]) -> Sequence[T]:
        """Those of them that this process takes."""
        return things[self.group.rank() :: self.group.size()]

    def told(self, value: T) -> list[T]:
        """What each process has here, in the order of ranks, once all are here."""
        world = self.group.size()
        if world == 1:
            return [value]
        values: list[Any] = [None] * world
        try:
            distributed.all_gather_object(values, value, group=torch_group(self.group))
        except RuntimeError as error:
            raise LostRankError(None, world, f"a collective failed: {error}") from error
        return values

    def _here(
        self, work: Callable[[int], T], sizes: dict[int, int], tell: Tell, threads: int
    ) -> dict[int, T]:
        """This process' share, on its threads; what one of them raises, the caller sees."""
        total, seen = sum(sizes.values()), 0
        tell(0, total)
        if len(sizes) == 1:  # of a small model: a thread would take longer to start than to do it
            (at,) = sizes
            with _team(1):
                done = {at: _alone(work, at)}
            tell(total, total)
            return done
        # Threads that each have a team of torch's wait for each other: a team of one has nobody to wait for.
        pool = ThreadPoolExecutor(threads, "qload-verify", torch.set_num_threads, (1,))
        with _team(torch.get_num_threads()):
            try:
                tasks: dict[Future[T], int] = {
                    pool.submit(contextvars.copy_context().run, _alone, work, at): at for at in sizes
                }
                for task in as_completed(tasks):
                    task.result()
                    seen += sizes[tasks[task]]
                    tell(seen, total)
            finally:
                pool.shutdown(cancel_futures=True)  # an interrupt does not wait for what has not begun
        return {at: task.result() for task, at in tasks.items()}


@contextmanager
def _team(threads: int) -> Iterator[None]:
    """So many of torch's threads for one operation, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _alone(work: Callable[[int], T], at: int) -> T:
    """Native code that is called by many threads needs no more of them."""
    with modules.one_thread():
        return work(at)
