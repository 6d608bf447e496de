"""Process groups of threads in one process, with an exchange of values in memory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any, TypeVar

import pytest

from qload.parallel import ProcessGroup, Rank
from qload.verify.workers import Workers

T = TypeVar("T")
WAIT = 60  # seconds, timeout for another thread


@dataclass
class Meeting:
    """Exchange of values between a fixed number of threads."""

    size: int
    values: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = [None] * self.size
        self.barrier = Barrier(self.size)

    def told(self, rank: int, value: T) -> list[T]:
        """Return the values of all threads, after all have called."""
        self.values[rank] = value
        self.barrier.wait(WAIT)
        found = deepcopy(self.values)  # as processes share no objects
        self.barrier.wait(WAIT)
        return found


@dataclass(frozen=True)
class ThreadCrew(Workers):
    """Worker in one thread of the exchange."""

    meeting: Meeting | None = None

    def gather(self, value: T) -> list[T]:
        """Exchange a value with the other threads; a single thread gets its own value."""
        if self.meeting is None or self.group.size() == 1:
            return [value]
        return self.meeting.told(self.group.rank(), value)


def run(
    size: int, work: Callable[[ProcessGroup], T], monkeypatch: pytest.MonkeyPatch
) -> list[T | BaseException]:
    """Return the result or error of `work` for each rank; an error ends the exchange of all others."""
    meeting = Meeting(size)
    of = Workers.of

    def crew(group: ProcessGroup | None) -> Workers:
        several = isinstance(group, Rank) and group.size() == size > 1
        return ThreadCrew(1, group, meeting) if several and group else of(group)

    def answer(rank: int) -> T | BaseException:
        try:
            return work(Rank(rank, size))
        except BaseException as error:
            meeting.barrier.abort()
            return error

    with monkeypatch.context() as patched, ThreadPoolExecutor(size) as pool:
        patched.setattr(Workers, "of", staticmethod(crew))
        return list(pool.map(answer, range(size)))
