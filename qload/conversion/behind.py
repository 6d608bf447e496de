"""Work that goes on beside what its caller does: hashes, and files that are brought to the disk."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Behind:
    """One thread that does one task after another."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._tasks: list[Future[object]] = []

    def later(self, task: Callable[[], T]) -> "Future[T]":
        """A task for the thread; raises what an earlier one raised."""
        self._raise(each for each in self._tasks if each.done())
        made = self._pool.submit(task)
        self._tasks.append(made)  # type: ignore[arg-type]
        return made

    def wait(self) -> None:
        """Until all is done; raises what one of them raised."""
        self._raise(self._tasks)

    def _raise(self, tasks: "Iterator[Future[object]] | list[Future[object]]") -> None:
        for each in tasks:
            each.result()


@contextmanager
def behind(name: str) -> Iterator[Behind]:
    """A thread of this name; afterwards what it has not begun is not done any more."""
    pool = ThreadPoolExecutor(1, name)
    try:
        yield Behind(pool)
    finally:
        pool.shutdown(cancel_futures=True)
