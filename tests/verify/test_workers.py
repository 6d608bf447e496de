"""Work on many items in threads: results in order, bytes done, and threads of torch."""

import threading
import time

import pytest
import torch

from qload.errors import ArgumentError
from qload.parallel import ALONE, Rank
from qload.verify.workers import Workers

SIZES = [5, 0, 7, 3]


def ignore(done: int, total: int) -> None:
    """Take no notice of progress."""


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_results_are_in_the_order_of_the_items(threads: int) -> None:
    def work(at: int) -> int:
        time.sleep(0.01 * (len(SIZES) - at))  # the first item ends last
        return at * at

    steps: list[tuple[int, int]] = []
    found = Workers(threads, ALONE).run(work, SIZES, lambda *step: steps.append(step))

    assert found == [0, 1, 4, 9]
    assert (steps[0], steps[-1], len(steps)) == ((0, 15), (15, 15), 5)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    if threads == 1:
        assert steps == [(0, 15), (5, 15), (5, 15), (12, 15), (15, 15)]


def test_one_item_and_none_have_their_progress_too() -> None:
    steps: list[tuple[int, int]] = []
    workers = Workers(2, ALONE)

    assert workers.run(lambda at: "one", [4], lambda *step: steps.append(step)) == ["one"]
    assert workers.run(lambda at: "none", [], lambda *step: steps.append(step)) == []
    assert steps == [(0, 4), (4, 4), (0, 0)]


@pytest.mark.parametrize(("threads", "limit", "most"), [(4, None, 4), (4, 2, 2), (2, 4, 2), (1, None, 1)])
def test_no_more_threads_work_than_are_allowed(threads: int, limit: int | None, most: int) -> None:
    lock, barrier, running, largest = threading.Lock(), threading.Barrier(most), 0, 0

    def work(at: int) -> None:
        nonlocal running, largest
        with lock:
            running += 1
            largest = max(largest, running)
        barrier.wait(10)  # as many as may work do work at once
        with lock:
            running -= 1

    Workers(threads, ALONE).run(work, [1] * 4, ignore, limit)

    assert largest == most


@pytest.mark.parametrize("count", [1, 3])
def test_each_item_has_one_thread_of_torch_and_callers_have_theirs_back(count: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = Workers(2, ALONE).run(lambda at: torch.get_num_threads(), [1] * count, ignore)
        assert (found, torch.get_num_threads()) == ([1] * count, 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_reaches_the_caller(count: int) -> None:
    def work(at: int) -> None:
        raise ValueError(f"item {at}")

    with pytest.raises(ValueError, match="item 0"):
        Workers(1, ALONE).run(work, [1] * count, ignore)


def test_each_rank_has_every_so_many_th_item() -> None:
    shares = [Workers(1, Rank(rank, 3)).share(range(8)) for rank in range(3)]

    assert [list(share) for share in shares] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert [Workers(1, Rank(rank, 3)).is_first for rank in range(3)] == [True, False, False]


def test_a_group_that_cannot_gather_is_refused() -> None:
    assert Workers.of(None).group is ALONE
    assert Workers.of(Rank(0, 1)).group.size() == 1
    with pytest.raises(ArgumentError) as caught:
        Workers.of(Rank(0, 2))

    assert (caught.value.argument, caught.value.expected) == (
        "process_group",
        "None, or a group of torch.distributed",
    )
