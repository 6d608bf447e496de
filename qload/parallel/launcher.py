"""Worlds of processes, launched by torchrun or by RANK, WORLD_SIZE and MASTER_ADDR."""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from qload.errors import ArgumentError, LostRankError, QloadError, checked
from qload.parallel.process_group import ALONE, ProcessGroup, Rank, collectives_of, release_captures
from qload.parallel.rank_watchdog import RankWatchdog, deserialize_error, serialize_error

log: logging.Logger = logging.getLogger("qload")

WAKE_SIGNAL = getattr(signal, "SIGUSR1", signal.SIGINT)
MAX_NATIVE_WAIT_S = 10  # a main thread that has not come back from native code by then ends with the process
MAX_ERROR_EXIT_S = 5  # for which a launcher's SIGTERM waits while an error is on its way out


class Interrupt:
    """Within the block, `tell(error)` of any thread raises `error` in the main thread.

    By a signal, so that waiting ends; a main thread that waits in native code, as for a collective of NCCL,
    cannot be reached, and then the process ends once the error is logged. SIGTERM, by which launchers end the
    ranks that are left, waits until the error has come out. ArgumentError outside of the main thread.
    """

    def __init__(self) -> None:
        self.error: QloadError | None = None
        self._since = 0.0
        self._known, self._done = threading.Event(), threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise ArgumentError("joined_world", "a call in the main thread", threading.current_thread().name)
        self._before = {WAKE_SIGNAL: signal.signal(WAKE_SIGNAL, self._raise), signal.SIGTERM: signal.SIG_DFL}
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
        if error is not None:
            self._since = time.monotonic()
        self.restore_signals()

    def restore_signals(self) -> None:
        """Restore the signal handlers from before the block; SIGTERM waits while an error propagates.

        A handler in Python cannot end a main thread that waits in native code; the default one can.
        """
        signal.signal(WAKE_SIGNAL, self._before[WAKE_SIGNAL])
        if self.error is None:
            signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])

    def finish(self) -> None:
        """Raise nothing from here on: the main thread is on its way out."""
        self._done.set()

    def tell(self, error: QloadError) -> None:
        """Raise `error` in the main thread, from any other."""
        if self._done.is_set():
            return
        self.error, self._since = error, time.monotonic()
        self._known.set()
        threading.Thread(target=self._reach, name="qload-interrupt", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Until an error is told, for so long at most."""
        self._known.wait(seconds)

    def _reach(self) -> None:
        main = threading.main_thread().ident
        if main is not None and not self._done.is_set():
            signal.pthread_kill(main, WAKE_SIGNAL)
        if not self._done.wait(MAX_NATIVE_WAIT_S):
            log.critical("%s", self.error)
            os._exit(1)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.error is not None and not self._done.is_set():
            raise self.error

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """A launcher ends this rank: the error that made it do so comes first."""
        if not self._done.is_set() and self._known.wait(MAX_ERROR_EXIT_S) and self.error is not None:
            raise self.error
        if self.error is not None and time.monotonic() - self._since < MAX_ERROR_EXIT_S:
            return
        signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)


WATCHDOG_WAIT_S = 3.0  # after a collective has failed, in which the watch says which rank was lost


@dataclass(frozen=True)
class LaunchedRank(Rank):
    """A rank as its launcher has told it: its place, its place on this machine, and where rank 0 is."""

    local: int = 0
    address: str = "localhost"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "LaunchedRank":
        """From RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; ArgumentError for what is no rank.

        A world of one without WORLD_SIZE. `environment`: the variables of the process.
        """
        if "WORLD_SIZE" not in environment:
            return cls(0, 1)
        world, rank = _read_number(environment, "WORLD_SIZE"), _read_number(environment, "RANK")
        local = _read_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
        address = environment.get("MASTER_ADDR", "" if world > 1 else "localhost")
        if not address:
            raise ArgumentError("MASTER_ADDR", "where rank 0 is, as launchers set it", "nothing")
        if world > 1:
            _read_number(environment, "MASTER_PORT")
        return cls(rank, world, local, address)

    def device(self, device: torch.device | str) -> torch.device:
        """The device of this rank: of "cuda" that of its place on the machine; ArgumentError for none."""
        try:
            asked = torch.device(device)
        except RuntimeError as error:
            raise ArgumentError("device", "a device that torch knows", repr(device)) from error
        if str(asked) != "cuda":
            return asked
        return torch.device("cuda", self.local % max(torch.cuda.device_count(), 1))


@checked
def joined_world(
    device: torch.device | str = "cpu", *, timeout_s: float = 600.0
) -> AbstractContextManager[ProcessGroup]:
    """The world that this process was launched into, by torchrun or by hand, as a process group.

    Within the block the ranks watch each other: where one fails with an error of qload, all others raise the
    same error, and where one dies they raise LostRankError, at once and wherever they are. A main thread that
    waits in native code cannot raise; its process ends after some seconds, once the error is logged.

    The group ends with the block, whatever still refers to it: the CUDA graphs of engines are freed, and an
    engine or a model that is called after it raises ArgumentError. torch's own group of the world is
    `torch.distributed.group.WORLD`, within the block.

    Without WORLD_SIZE in the environment it is a world of one. Call it in the main thread: the watch
    takes SIGUSR1 and SIGTERM. ArgumentError for variables that name no rank.

    Parameters
    ----------
    device
        Of the collectives: "cuda" adds NCCL to gloo, and makes this rank's GPU the current one.
    timeout_s
        How long ranks wait for each other, in seconds, before they are taken to be lost.

    Examples
    --------
    >>> from qload import joined_world
    >>> with joined_world() as group:
    ...     group.rank(), group.size()
    (0, 1)
    """
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ArgumentError("timeout_s", "a number of seconds above 0", str(timeout_s))
    launch = LaunchedRank.of(os.environ)
    if launch.size() > 1 and torch.distributed.is_initialized():
        raise ArgumentError(
            "joined_world", "a process that has no process group yet", "one that has joined one"
        )
    return _join_world(launch, launch.device(device), timeout_s)


@contextmanager
def _join_world(launch: LaunchedRank, here: torch.device, timeout_s: float) -> Iterator[ProcessGroup]:
    """The world, for as long as the block lasts."""
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if launch.size() == 1:
        yield ALONE
        return
    with Interrupt() as interrupt:
        watch = RankWatchdog(launch.rank(), launch.size(), interrupt.tell)
        group = _create_group(launch, here, watch, timeout_s)
        ended: BaseException | None = LostRankError(launch.rank(), launch.size(), "it was interrupted")
        try:
            yield group
            ended = None
        except BaseException as error:
            ended = _root_cause(error, interrupt)
            if ended is error:
                raise
            raise ended from error
        finally:
            interrupt.finish()
            watch.end(ended)
            if ended is None:
                interrupt.restore_signals()
                release_captures()
                torch.distributed.destroy_process_group()


@checked
def agree(group: ProcessGroup, error: QloadError | None) -> None:
    """Raise on every rank of `group` the error of the first rank that has one; nothing where none has.

    For what only one rank may find, such as a file that is missing on its machine: each rank checks what it
    can before it reads weights, hands in the `error` that it found or None, and all go on or none does.

    Examples
    --------
    >>> from qload import ArgumentError, FakeWorld, agree
    >>> def work(group):
    ...     found = ArgumentError("path", "a folder", "none") if group.rank() == 1 else None
    ...     try:
    ...         agree(group, found)
    ...     except ArgumentError as error:
    ...         return error.got
    >>> FakeWorld(3).run(work)
    ['none', 'none', 'none']
    """
    ranks = collectives_of(group)
    said = b"" if error is None else serialize_error(error, group.rank(), group.size())
    sizes = ranks.gathered(torch.tensor([len(said)])).tolist()
    if not any(sizes):
        return
    padded = torch.tensor([*said, *bytes(max(sizes) - len(said))], dtype=torch.uint8)
    first = next(rank for rank, size in enumerate(sizes) if size)
    everything: Tensor = ranks.gathered(padded[None], dim=0)[first, : sizes[first]]
    raise deserialize_error(bytes(everything.tolist()), first, group.size())


def _create_group(
    launch: LaunchedRank, device: torch.device, watch: RankWatchdog, timeout_s: float
) -> ProcessGroup:
    """The process group of all ranks, once each of them is watched; LostRankError where one stays away."""
    distributed, timeout = torch.distributed, timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        meeting = distributed.rendezvous(  # type: ignore[attr-defined]  # as its documentation has it
            "env://", launch.rank(), launch.size(), timeout=timeout
        )
        store, rank, world = next(iter(meeting))
        store.set_timeout(timeout)
        watch.start(store, launch.address, timeout_s)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except LostRankError:
        raise
    except (RuntimeError, ValueError) as error:
        watch.stop()
        raise LostRankError(None, launch.size(), f"the ranks did not meet: {error}") from error
    world_group: Any = distributed.group.WORLD
    return collectives_of(world_group)


def _root_cause(error: BaseException, interrupt: Interrupt) -> BaseException:
    """Why a rank ends: what the watch was told, where a collective failed for it."""
    if isinstance(error, LostRankError) and error.rank is None:
        interrupt.wait(WATCHDOG_WAIT_S)
    return interrupt.error or error


def _read_number(environment: Mapping[str, str], name: str) -> int:
    said = environment.get(name, "")
    if not (said.isascii() and said.isdigit()) or len(said) > 9:
        raise ArgumentError(name, "a whole number, as launchers set it", repr(said))
    return int(said)
