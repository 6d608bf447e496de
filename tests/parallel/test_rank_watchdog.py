"""Ranks that watch each other, here as threads: who has left, who failed, and who is gone without a word."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Event

import pytest

from qload.errors import ArgumentError, LostRankError, QloadError
from qload.parallel.launcher import STORE_KEY, RankWatchdog

Told = Queue[tuple[int, QloadError]]
PATIENCE = 20  # seconds


class Board:
    """A store as torch has one: `get` waits for `set`."""

    def __init__(self) -> None:
        self.said, self.is_there = "", Event()

    def set(self, key: str, value: str) -> None:
        assert key == STORE_KEY
        self.said = value
        self.is_there.set()

    def get(self, key: str) -> bytes:
        assert self.is_there.wait(60)
        return self.said.encode()


def started(world: int, told: Told, board: Board | None = None) -> list[RankWatchdog]:
    """A watch for each rank, all of which have met."""
    board = board or Board()

    def one(rank: int) -> RankWatchdog:
        watch = RankWatchdog(rank, world, lambda error: told.put((rank, error)))
        watch.start(board, "127.0.0.1", 60)
        return watch

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def gone(watch: RankWatchdog) -> None:
    """End as a process that is killed: it does nothing more, and the system closes its connections."""
    watch._halt()
    for peer in watch._peers:
        peer.shutdown(socket.SHUT_RDWR)


def left(watch: RankWatchdog) -> None:
    watch.end(None)


def failed(watch: RankWatchdog) -> None:
    watch.end(ArgumentError("x", "one", "another"))


def broken(watch: RankWatchdog) -> None:
    watch.end(ValueError("broken"))


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        (gone, LostRankError, "rank {} of 3 is lost\n  reason   its process ended"),
        (failed, ArgumentError, "x\n  expected one\n  got      another"),
        (broken, LostRankError, "rank {} of 3 is lost\n  reason   it ended with ValueError: broken"),
    ],
)
def test_what_ends_one_rank_is_told_to_all_others(
    rank: int, end: Callable[[RankWatchdog], None], kind: type[QloadError], text: str
) -> None:
    told: Told = Queue()
    watches = started(3, told)

    end(watches[rank])

    heard = dict([told.get(timeout=PATIENCE), told.get(timeout=PATIENCE)])
    for other in {0, 1, 2} - {rank}:
        assert type(heard[other]) is kind
        assert str(heard[other]) == text.format(rank)
    for watch in watches:
        watch.stop()


def test_ranks_that_leave_are_not_missed_one_after_another() -> None:
    told: Told = Queue()
    watches = started(4, told)

    for rank in (2, 0, 3, 1):
        left(watches[rank])

    assert told.empty()


def test_a_process_ends_while_its_rank_is_watched() -> None:
    watches = started(2, Queue())

    threads = [thread for thread in threading.enumerate() if thread.name == "qload-watch"]

    assert len(threads) >= len(watches)
    assert all(thread.daemon for thread in threads)
    for watch in watches:
        watch.stop()


def test_a_rank_that_has_left_does_not_hide_one_that_fails_later() -> None:
    told: Told = Queue()
    watches = started(3, told)

    left(watches[1])
    failed(watches[2])

    assert told.get(timeout=PATIENCE)[0] == 0
    left(watches[0])
    assert told.empty()


def test_a_stranger_is_none_of_the_ranks() -> None:
    """Who does not know the word that the store tells, or says another rank, is not let in."""
    told: Told = Queue()
    board = Board()

    def strange() -> None:
        port, host, word = board.get(STORE_KEY).decode().split(" ")
        for said in (
            b"no word 1",
            b"wrong 1",
            f"{word} 0".encode(),
            f"{word} 7".encode(),
            f"{word} x".encode(),
        ):
            with socket.create_connection((host, int(port)), 60) as peer:
                peer.sendall(len(said).to_bytes(4, "big") + said)
                assert peer.recv(1) == b""

    def first() -> RankWatchdog:
        watch = RankWatchdog(0, 2, lambda error: told.put((0, error)))
        watch.start(board, "127.0.0.1", 60)
        return watch

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(first)
        pool.submit(strange).result()
        second = RankWatchdog(1, 2, lambda error: told.put((1, error)))
        second.start(board, "127.0.0.1", 60)
        watch = waiting.result()

    failed(second)
    assert told.get(timeout=PATIENCE)[0] == 0
    watch.stop()


def test_a_rank_may_greet_late() -> None:
    board, told = Board(), Queue[QloadError]()
    first = RankWatchdog(0, 2, told.put)

    def second() -> None:
        port, host, word = board.get(STORE_KEY).decode().split(" ")
        with socket.create_connection((host, int(port)), 60) as peer:
            time.sleep(0.05)
            said = f"{word} 1".encode()
            peer.sendall(len(said).to_bytes(4, "big") + said)

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(second)
        first.start(board, "127.0.0.1", 60)
        late.result()

    assert str(told.get(timeout=PATIENCE)) == "rank 1 of 2 is lost\n  reason   its process ended"
    first.stop()


def test_a_rank_that_stays_away_is_named() -> None:
    watch = RankWatchdog(0, 2, lambda error: None)

    with pytest.raises(LostRankError, match=r"rank 1 of 2 is lost\n  reason   it did not connect"):
        watch.start(Board(), "127.0.0.1", 0.01)


def test_what_is_no_message_is_a_rank_that_is_lost() -> None:
    for said in (b"\xff\xff\xff\xff", (4).to_bytes(4, "big") + b"noth"):
        told: Told = Queue()
        first, second = started(2, told)
        for peer in second._peers:
            peer.sendall(said)

        heard = dict([told.get(timeout=PATIENCE), told.get(timeout=PATIENCE)])  # rank 0 tells the other

        assert {type(error) for error in heard.values()} == {LostRankError}
        assert str(heard[0]).startswith("rank 1 of 2 is lost")
        first.stop()
        second.stop()
