"""Crews of several processes that are threads of this one, which tell each other values in its memory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any, TypeVar

import pytest

from qload.parallel import ProcessGroup, Rank
from qload.verify.workers import Workers

T = TypeVar("T")
WAIT = 60  # seconds for another thread, before it counts as lost


@dataclass
class Meeting:
    """Where so many threads tell each other what they have."""

    size: int
    values: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = [None] * self.size
        self.barrier = Barrier(self.size)

    def told(self, rank: int, value: T) -> list[T]:
        """Everybody's value, once all have come."""
        self.values[rank] = value
        self.barrier.wait(WAIT)
        found = list(self.values)
        self.barrier.wait(WAIT)
        return found


@dataclass(frozen=True)
class ThreadCrew(Workers):
    """One of the threads that meet."""

    meeting: Meeting | None = None

    def gather(self, value: T) -> list[T]:
        """By the meeting, unless this one is alone."""
        if self.meeting is None or self.group.size() == 1:
            return [value]
        return self.meeting.told(self.group.rank(), value)


def run(
    size: int, work: Callable[[ProcessGroup], T], monkeypatch: pytest.MonkeyPatch
) -> list[T | BaseException]:
    """What `work` returns, or raises, for each process of a group; once one raises the others are alone."""
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
