"""What a launcher tells a process, errors that reach the main thread, refusals of all ranks together."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from qload.errors import ArgumentError, LostRankError, QloadError
from qload.parallel import ALONE, Collectives, FakeWorld, agree, joined_world, register_capture
from qload.parallel.launcher import WAKE_SIGNAL, Interrupt, LaunchedRank, RankWatchdog
from qload.parallel.process_group import torch_group
from tests.support import torchrun

LEAVE = """
import pathlib
import sys
import weakref
import torch
from qload.parallel import collectives_of, joined_world

with joined_world(timeout_s=120) as group:
    ranks, threads = collectives_of(group), weakref.ref(torch.distributed.group.WORLD)
    assert ranks.summed(torch.ones(3)).tolist() == [2, 2, 2]
pathlib.Path(sys.argv[1], f"rank {ranks.rank()}").write_text(str(threads()))
"""


def test_a_rank_is_read_from_what_launchers_set() -> None:
    said = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}

    launch = LaunchedRank.of(said)

    assert (launch.rank(), launch.size(), launch.local, launch.address) == (5, 8, 1, "10.0.0.1")
    assert launch.device("cpu") == torch.device("cpu")
    assert LaunchedRank.of({name: each for name, each in said.items() if name != "LOCAL_RANK"}).local == 5
    assert LaunchedRank.of({"RANK": "0", "WORLD_SIZE": "1"}).size() == 1
    assert LaunchedRank.of({"RANK": "3"}) == LaunchedRank(0, 1, 0, "localhost")
    assert LaunchedRank.of({"RANK": "0", "WORLD_SIZE": "1"}) == LaunchedRank(0, 1, 0, "localhost")


@pytest.mark.parametrize(("devices", "number"), [(0, 0), (1, 0), (4, 1), (8, 5)])
def test_a_rank_has_the_gpu_of_its_local_rank(
    devices: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)

    assert LaunchedRank(9, 16, 5).device("cuda") == torch.device("cuda", number)
    assert LaunchedRank(9, 16, 5).device("cuda:3") == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"WORLD_SIZE": "2"}, "RANK\n"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}, "process_group"),
        ({"WORLD_SIZE": "9" * 5000, "RANK": "2"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "²", "RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "here"}, "MASTER_PORT"),
    ],
)
def test_what_names_no_rank_is_refused(said: dict[str, str], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        LaunchedRank.of(said)


def test_without_a_launcher_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    with joined_world() as group:
        assert group is ALONE


def test_what_is_no_device_and_no_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    with pytest.raises(ArgumentError, match="a device of torch"):
        joined_world("abacus")
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="timeout_s"):
            joined_world(timeout_s=seconds)


def test_a_rank_that_stays_away_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    said = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    with (
        pytest.raises(LostRankError, match=r"of 2 is lost\n  reason   the ranks did not meet"),
        joined_world(timeout_s=1.0),
    ):
        pass


class Peer:
    """Rank 1 of a world of two, in a thread: its watchdog, and the errors that it receives."""

    def __init__(self, port: int) -> None:
        self.told: Queue[QloadError] = Queue()
        self.watchdog = RankWatchdog(1, 2, self.told.put)
        self.options: dict[str, Any] = {}
        self._pool = ThreadPoolExecutor(1)
        self._started = self._pool.submit(self._start, port)

    def _start(self, port: int) -> None:
        self.store = torch.distributed.TCPStore("127.0.0.1", port, 2, is_master=False)
        self.watchdog.start(self.store, "127.0.0.1", 60)

    def end(self, error: BaseException | None) -> None:
        """End as rank 1 does, with an error or without."""
        self._started.result()
        self.watchdog.end(error)

    def close(self) -> None:
        self._pool.shutdown()
        self.watchdog.stop()


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """This process as rank 0 of a world of two; collectives exchange nothing."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    said = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    handlers = {number: signal.getsignal(number) for number in (WAKE_SIGNAL, signal.SIGTERM)}
    init, other = torch.distributed.init_process_group, Peer(port)

    def init_fake(backend: str, *, store: object, **options: Any) -> None:
        other.options = {"backend": backend, **options}
        init("fake", store=FakeStore(), **options)

    monkeypatch.setattr(torch.distributed, "init_process_group", init_fake)
    yield other
    other.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Graph:
    """A capture that records the state of the world at its release."""

    def __init__(self) -> None:
        self.released: list[bool] = []

    def release(self) -> None:
        self.released.append(torch.distributed.is_initialized())


def test_a_world_lasts_as_long_as_its_block(peer: Peer) -> None:
    handlers = [signal.getsignal(number) for number in (WAKE_SIGNAL, signal.SIGTERM)]
    outside, graph = Graph(), Graph()
    register_capture(outside)
    with joined_world(timeout_s=60) as group:
        assert (group.rank(), group.size()) == (0, 2)
        assert torch_group(group) is torch.distributed.group.WORLD
        register_capture(graph)

    assert (peer.options["backend"], peer.options["timeout"].total_seconds()) == ("gloo", 60)
    assert (graph.released, outside.released) == ([True], [])
    assert not torch.distributed.is_initialized()
    assert [signal.getsignal(number) for number in (WAKE_SIGNAL, signal.SIGTERM)] == handlers
    peer.end(None)
    assert peer.told.empty()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ArgumentError("x", "one", "another"), "x\n  expected one\n  got      another"),
        (ValueError("broken"), "rank 0 of 2 is lost\n  reason   it ended with ValueError: broken"),
        (KeyboardInterrupt(), "rank 0 of 2 is lost\n  reason   it ended with KeyboardInterrupt: "),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_error_in_the_block_is_raised_as_it_is_and_sent_to_the_others(
    peer: Peer, error: BaseException, text: str
) -> None:
    with pytest.raises(type(error)) as caught, joined_world(timeout_s=60):
        raise error

    assert caught.value is error
    assert str(peer.told.get(timeout=20)) == text


@pytest.mark.parametrize(
    "wait",
    [lambda: time.sleep(600), lambda: fail(LostRankError(None, 2, "a collective failed: no peer"))],
    ids=["a wait", "a failed collective"],
)
def test_the_error_of_another_rank_ends_the_block(peer: Peer, wait: Callable[[], None]) -> None:
    def work() -> None:
        threading.Timer(0.05, peer.end, (ArgumentError("y", "two", "three"),)).start()
        wait()

    with pytest.raises(ArgumentError, match=r"^y\n  expected two\n  got      three$"), joined_world():
        work()


def test_an_error_of_another_rank_before_the_group_exists_is_raised_as_it_is(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(*arguments: object, **options: object) -> None:
        peer.end(ArgumentError("y", "two", "three"))
        time.sleep(600)

    monkeypatch.setattr(torch.distributed, "init_process_group", wait)

    with pytest.raises(ArgumentError, match=r"^y\n  expected two\n  got      three$"), joined_world():
        pass


def fail(error: BaseException) -> None:
    raise error


def test_a_process_with_a_group_joins_no_world(peer: Peer) -> None:
    with (
        joined_world(timeout_s=60),
        pytest.raises(ArgumentError, match=r"^joined_world\n  expected a process without a process group\n"),
    ):
        joined_world()


@pytest.mark.slow
def test_no_thread_of_a_world_outlives_it(tmp_path: Path) -> None:
    """Such a thread aborts a process that ends meanwhile, a run in a hundred: so it is looked for."""
    (tmp_path / "leave.py").write_text(LEAVE)

    run = torchrun.ended(2, str(tmp_path / "leave.py"), str(tmp_path))

    assert run.returncode == 0, run.stderr
    assert [(tmp_path / f"rank {rank}").read_text() for rank in (0, 1)] == ["None", "None"]


RELEASE = """
import pathlib
import signal
import sys
import torch
from qload.parallel import joined_world, register_capture

class Graph:
    def release(self):
        alive = torch.distributed.is_initialized()
        handler = signal.getsignal(signal.SIGTERM)
        pathlib.Path(sys.argv[1], f"rank {rank}").write_text(f"{alive} {handler == before}")

outside, before = Graph(), signal.getsignal(signal.SIGTERM)
register_capture(outside)  # of no world: a second call of `release` would write False
with joined_world(timeout_s=120) as group:
    rank, graph = group.rank(), Graph()
    register_capture(graph)
    gone = Graph()
    register_capture(gone)
    del gone
"""


@pytest.mark.slow
def test_graphs_are_freed_before_the_group_of_a_world_is_destroyed(tmp_path: Path) -> None:
    """By then SIGTERM has its own handler again, which ends a main thread that waits in native code."""
    (tmp_path / "release.py").write_text(RELEASE)

    run = torchrun.ended(2, str(tmp_path / "release.py"), str(tmp_path))

    assert run.returncode == 0, run.stderr
    assert [(tmp_path / f"rank {rank}").read_text() for rank in (0, 1)] == ["True True", "True True"]


@pytest.mark.parametrize("ranks", [{1}, {0, 2}, {0, 1, 2}])
def test_all_ranks_raise_the_error_of_the_first_that_has_one(ranks: set[int]) -> None:
    def work(group: Collectives) -> str:
        own = ArgumentError("path", "a folder", f"none of rank {group.rank()}")
        with pytest.raises(ArgumentError) as caught:
            agree(group, own if group.rank() in ranks else None)
        return str(caught.value)

    assert set(FakeWorld(3).run(work)) == {f"path\n  expected a folder\n  got      none of rank {min(ranks)}"}


def test_where_no_rank_has_an_error_all_go_on() -> None:
    FakeWorld(3).run(lambda group: agree(group, None))
    agree(ALONE, None)
    with pytest.raises(ArgumentError, match="mine"):
        agree(ALONE, ArgumentError("x", "yours", "mine"))


def test_an_error_of_another_thread_is_raised_in_the_main_thread_and_ends_its_waiting() -> None:
    before = signal.getsignal(WAKE_SIGNAL), signal.getsignal(signal.SIGTERM)

    def wait() -> None:
        with Interrupt() as interrupt:
            threading.Thread(
                target=interrupt.raise_in_main_thread, args=(LostRankError(1, 2, "gone"),)
            ).start()
            time.sleep(600)

    with pytest.raises(LostRankError, match="rank 1 of 2"):
        wait()
    assert signal.getsignal(WAKE_SIGNAL) is before[0]
    signal.signal(signal.SIGTERM, before[1])


def test_what_comes_too_late_is_not_raised() -> None:
    before = signal.getsignal(signal.SIGTERM)

    with Interrupt() as interrupt:
        pass
    interrupt.raise_in_main_thread(LostRankError(1, 2, "gone"))

    assert interrupt.error is None
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_launchers_end_waits_for_the_error_that_caused_it() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def wait() -> None:
        with Interrupt() as interrupt:
            threading.Timer(0.05, interrupt.raise_in_main_thread, (LostRankError(1, 2, "gone"),)).start()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)

    with pytest.raises(LostRankError, match="rank 1 of 2"):
        wait()
    os.kill(os.getpid(), signal.SIGTERM)  # while the error is on its way out: the process is still here
    signal.signal(signal.SIGTERM, before)


def test_a_world_is_joined_in_the_main_thread() -> None:
    found: list[Exception] = []

    def work() -> None:
        try:
            with Interrupt():
                pass
        except ArgumentError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert "a call in the main thread" in str(found[0])
