"""Worlds of processes, launched by torchrun or by RANK, WORLD_SIZE and MASTER_ADDR."""

from __future__ import annotations

import io
import logging
import math
import os
import pickle
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from qload import devices
from qload.errors import ArgumentError, LostRankError, QloadError, checked
from qload.lazy_torch import Tensor, torch
from qload.parallel.peers import connect_peers
from qload.parallel.process_group import (
    ALONE,
    Collectives,
    ProcessGroup,
    Rank,
    collectives_of,
    release_captures,
    torch_group,
    with_peers,
)

log: logging.Logger = logging.getLogger("qload")

MAX_ERROR_BYTES = 1 << 16  # a longer error is sent as text
MAX_SILENCE_S = 20  # of a machine, before its connections count as closed
STORE_KEY = "qload/watch"
LEFT_MESSAGE = b""  # of a rank that left the world without an error
PROCESS_ENDED = "its process ended"


def serialize_error(error: BaseException, rank: int, world: int) -> bytes:
    """Pickle an error of a rank into at most `MAX_ERROR_BYTES`; an error of another library becomes text."""
    if isinstance(error, QloadError):
        message = pickle.dumps(error)
        if len(message) <= MAX_ERROR_BYTES:
            return message
    reason = f"it ended with {type(error).__name__}: {error}"
    return pickle.dumps(LostRankError(rank, world, reason[: MAX_ERROR_BYTES // 8]))


def deserialize_error(message: bytes, rank: int, world: int) -> QloadError:
    """Unpickle the error of another rank; invalid bytes become a `LostRankError` of that rank."""
    try:
        error = _ErrorUnpickler(io.BytesIO(message)).load()
    except Exception:  # invalid pickles raise errors of any type
        error = None
    if isinstance(error, QloadError):
        return error
    return LostRankError(rank, world, "its message is not an error of qload")


class _ErrorUnpickler(pickle.Unpickler):
    """Unpickler for errors of qload only."""

    def find_class(self, module: str, name: str) -> Any:
        kind = super().find_class(module, name) if module.startswith("qload.errors.") else None
        if not (isinstance(kind, type) and issubclass(kind, QloadError)):
            raise pickle.UnpicklingError(name)
        return kind


class Store(Protocol):
    """Key-value store of all ranks, such as a `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Publish a value to all ranks."""

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""


class RankWatchdog:
    """Thread that watches the ranks of a world, and reports the error of the first failed rank.

    Parameters
    ----------
    rank, world
        This rank, and the number of ranks.
    report
        Callback for the error, called once in the thread of the watchdog.
    """

    def __init__(self, rank: int, world: int, report: Callable[[QloadError], None]) -> None:
        self.rank, self.world = rank, world
        self._report = report
        self._peers: dict[socket.socket, int] = {}
        self._waker, self._woken = socket.socketpair()
        self._thread = Thread(target=self._watch, name="qload-watch", daemon=True)

    def start(self, store: Store, host: str, timeout_s: float) -> None:
        """Connect the ranks, with rank 0 on `host`, and start the thread; LostRankError if one is missing."""
        try:
            if self.rank == 0:
                self._accept(store, host, time.monotonic() + timeout_s)
            else:
                self._connect(store, timeout_s)
        except OSError as error:
            absent = sorted({*range(1, self.world)} - {*self._peers.values()}) if self.rank == 0 else [0]
            self.stop()
            raise LostRankError(absent[0], self.world, f"it did not connect: {error}") from error
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """Send the other ranks the error of this rank, or that it left, and stop the watchdog."""
        self._halt()
        self._send_to_peers(LEFT_MESSAGE if error is None else serialize_error(error, self.rank, self.world))
        self.stop()

    def stop(self) -> None:
        """Stop the thread and close all connections."""
        self._halt()
        for connection in (*self._peers, self._woken):
            connection.close()
        self._peers.clear()

    def _halt(self) -> None:
        self._waker.close()  # which wakes the thread
        if self._thread.is_alive():
            self._thread.join()

    def _accept(self, store: Store, host: str, until: float) -> None:
        """Accept a connection from every other rank, with the token from the store; on rank 0."""
        token = secrets.token_hex(16).encode()
        with _create_server(host) as server:
            store.set(STORE_KEY, f"{server.getsockname()[1]} {host} {token.decode()}")
            while len(self._peers) < self.world - 1:
                server.settimeout(max(until - time.monotonic(), 0.001))
                peer, _ = server.accept()
                peer.settimeout(max(until - time.monotonic(), 0.001))
                rank = _parse_greeting(_receive_message(peer), token)
                if rank is None or rank in self._peers.values() or not 0 < rank < self.world:
                    peer.close()  # not a rank of this world
                    continue
                self._peers[_enable_keepalive(peer)] = rank

    def _connect(self, store: Store, timeout_s: float) -> None:
        port, host, token = store.get(STORE_KEY).decode().split(" ")
        peer = socket.create_connection((host, int(port)), timeout_s)
        _send_message(peer, f"{token} {self.rank}".encode())
        self._peers[_enable_keepalive(peer)] = 0

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in (*self._peers, self._woken):
                selector.register(connection, selectors.EVENT_READ)
            while self._peers:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        return
                    peer = next(peer for peer in self._peers if peer is key.fileobj)
                    error = self._receive_error(peer)
                    selector.unregister(peer)
                    if error is None:
                        peer.close()
                        del self._peers[peer]
                        continue
                    if self.rank == 0:
                        self._send_to_peers(serialize_error(error, self.rank, self.world))
                    self._report(error)
                    return

    def _receive_error(self, peer: socket.socket) -> QloadError | None:
        """Receive the error of a rank; None if it left without one."""
        rank = self._peers[peer]
        try:
            message = _receive_message(peer)
        except OSError:
            return LostRankError(rank, self.world, PROCESS_ENDED)
        return None if message == LEFT_MESSAGE else deserialize_error(message, rank, self.world)

    def _send_to_peers(self, message: bytes) -> None:
        for peer in self._peers:
            with suppress(OSError):  # the peer ended too
                _send_message(peer, message)


def _create_server(host: str) -> socket.socket:
    """Listen on the address of rank 0, or on any address of this machine."""
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", 0))


def _parse_greeting(message: bytes, token: bytes) -> int | None:
    """Return the rank of a connection; None for a wrong token."""
    shown, _, rank = message.partition(b" ")
    is_valid = secrets.compare_digest(shown, token) and rank.isdigit()
    return int(rank[:8]) if is_valid else None


def _enable_keepalive(peer: socket.socket) -> socket.socket:
    """Make a dead machine an error of its connection after `MAX_SILENCE_S`."""
    peer.settimeout(MAX_SILENCE_S)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", MAX_SILENCE_S // 5 - 1)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return peer


def _send_message(peer: socket.socket, message: bytes) -> None:
    peer.sendall(len(message).to_bytes(4, "big") + message)


def _receive_message(peer: socket.socket) -> bytes:
    """Receive one message; ConnectionError for a closed connection or a message over the limit."""
    size = int.from_bytes(_receive_bytes(peer, 4), "big")
    if size > 2 * MAX_ERROR_BYTES:
        raise ConnectionError(f"a message of {size} bytes")
    return _receive_bytes(peer, size)


def _receive_bytes(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = peer.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the connection was closed")
        data += chunk
    return bytes(data)


WAKE_SIGNAL = getattr(signal, "SIGUSR1", signal.SIGINT)
MAX_NATIVE_WAIT_S = 10  # of a main thread in native code; then the process exits
MAX_ERROR_EXIT_S = 5  # of an error on its way out, before SIGTERM ends the process
WATCHDOG_WAIT_S = 3.0  # after a failed collective, for the watchdog to name the lost rank


@dataclass(frozen=True)
class LaunchedRank(Rank):
    """A rank with its local rank on the machine, and the address of rank 0, from its launcher."""

    local: int = 0
    address: str = "localhost"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> LaunchedRank:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; ArgumentError for invalid values.

        Without WORLD_SIZE it is a world of one. `environment`: the variables of the process.
        """
        if "WORLD_SIZE" not in environment:
            return cls(0, 1)
        world, rank = _read_number(environment, "WORLD_SIZE"), _read_number(environment, "RANK")
        local = _read_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
        address = environment.get("MASTER_ADDR", "" if world > 1 else "localhost")
        if not address:
            raise ArgumentError("MASTER_ADDR", "the address of rank 0, set by a launcher", "nothing")
        if world > 1:
            _read_number(environment, "MASTER_PORT")
        return cls(rank, world, local, address)

    def device(self, device: torch.device | str) -> torch.device:
        """Return the device of this rank; "cuda" means the GPU of its local rank.

        ArgumentError for an unknown device.
        """
        try:
            parsed = torch.device(device)
        except RuntimeError as error:
            raise ArgumentError("device", "a device of torch", repr(device)) from error
        if str(parsed) != "cuda":
            return parsed
        return torch.device("cuda", self.local % max(torch.cuda.device_count(), 1))


def _read_number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not (value.isascii() and value.isdigit()) or len(value) > 9:
        raise ArgumentError(name, "a whole number, set by a launcher", repr(value))
    return int(value)


class Interrupt:
    """Context in which any thread can raise an error in the main thread.

    A signal ends waiting in Python. Native code is first ended by the calls of `before_raising`; if the main
    thread cannot be reached nevertheless, the error is logged and the process exits. SIGTERM, with which
    launchers end the remaining ranks, waits until the error has propagated. ArgumentError outside of the main
    thread.
    """

    def __init__(self) -> None:
        self.error: QloadError | None = None
        self._error_time = 0.0
        self._has_error, self._finished = threading.Event(), threading.Event()
        self.before_raising: list[Callable[[], object]] = []  # calls that end waits in native code
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise ArgumentError("joined_world", "a call in the main thread", threading.current_thread().name)
        self._previous_handlers = {
            WAKE_SIGNAL: signal.signal(WAKE_SIGNAL, self._raise_error),
            signal.SIGTERM: signal.SIG_DFL,
        }
        self._previous_handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
        if error is not None:
            self._error_time = time.monotonic()
        self.restore_signals()

    def restore_signals(self) -> None:
        """Restore the previous signal handlers; SIGTERM waits while an error propagates.

        A handler in Python cannot end a main thread in native code, but the default handler can.
        """
        signal.signal(WAKE_SIGNAL, self._previous_handlers[WAKE_SIGNAL])
        if self.error is None:
            signal.signal(signal.SIGTERM, self._previous_handlers[signal.SIGTERM])

    def finish(self) -> None:
        """Raise no more errors: the block ends."""
        self._finished.set()
        self.before_raising.clear()  # which refer to the group

    def raise_in_main_thread(self, error: QloadError) -> None:
        """Raise `error` in the main thread; called from another thread."""
        if self._finished.is_set():
            return
        self.error, self._error_time = error, time.monotonic()
        self._has_error.set()
        threading.Thread(target=self._signal_main_thread, name="qload-interrupt", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait for an error, up to a number of seconds."""
        self._has_error.wait(seconds)

    def _signal_main_thread(self) -> None:
        for call in self.before_raising:
            with suppress(RuntimeError):  # the wait ended meanwhile
                call()
        main = threading.main_thread().ident
        if main is not None and not self._finished.is_set():
            signal.pthread_kill(main, WAKE_SIGNAL)
        if not self._finished.wait(MAX_NATIVE_WAIT_S):
            log.critical("%s", self.error)
            os._exit(1)

    def _raise_error(self, number: int, frame: FrameType | None) -> None:
        if self.error is not None and not self._finished.is_set():
            raise self.error

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Handle a launcher's SIGTERM: raise another rank's error if one arrives in time, else end."""
        if not self._finished.is_set() and self._has_error.wait(MAX_ERROR_EXIT_S) and self.error is not None:
            raise self.error
        if self.error is not None and time.monotonic() - self._error_time < MAX_ERROR_EXIT_S:
            return
        signal.signal(signal.SIGTERM, self._previous_handlers[signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)


@checked
def joined_world(
    device: torch.device | str = "cpu", *, timeout_s: float = 600.0
) -> AbstractContextManager[ProcessGroup]:
    """Join the world of this process, launched by torchrun or by hand, as a process group.

    Within the block the ranks watch each other. If one fails with an error of qload, all others raise the
    same error; if one dies, they raise LostRankError, at once and during any wait. A main thread that cannot
    be reached in native code does not raise; its process logs the error and exits after some seconds.

    The group ends with the block: the CUDA graphs of engines are freed, and a later call of an engine or a
    model raises ArgumentError. Within the block `torch.distributed.group.WORLD` is the group of the world.

    Without WORLD_SIZE in the environment it is a world of one. Call it in the main thread: the watchdog
    handles SIGUSR1 and SIGTERM. ArgumentError for invalid environment variables.

    Parameters
    ----------
    device
        Device of the collectives: "cuda" adds NCCL to gloo, and makes this rank's GPU the current device.
    timeout_s
        Seconds that ranks wait for each other before they count as lost.

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
        raise ArgumentError("joined_world", "a process without a process group", "a process with a group")
    return _join_world(launch, launch.device(device), timeout_s)


@contextmanager
def _join_world(launch: LaunchedRank, device: torch.device, timeout_s: float) -> Iterator[ProcessGroup]:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.size() == 1:
        yield ALONE
        return
    with Interrupt() as interrupt:
        watchdog = RankWatchdog(launch.rank(), launch.size(), interrupt.raise_in_main_thread)
        group = _create_group(launch, device, watchdog, timeout_s)
        cause: BaseException | None = LostRankError(launch.rank(), launch.size(), "it was interrupted")
        peers = None
        try:
            if device.type == "cuda":
                peers = connect_peers(group, device)
                interrupt.before_raising += _waits_of(group, peers)
            yield with_peers(group, peers)
            if peers is not None:
                _end_sums(group, device)
            cause = None
        except BaseException as error:
            cause = _root_cause(error, interrupt)
            if cause is error:
                raise
            raise cause from error
        finally:
            interrupt.finish()
            watchdog.end(cause)
            if peers is not None:
                peers.stop()  # after an error, kernels may wait for ranks that do not come
                peers.close()
            if cause is None:
                interrupt.restore_signals()
                release_captures()
                torch.distributed.destroy_process_group()


def _waits_of(group: Collectives, peers: devices.PeerSums | None) -> list[Callable[[], object]]:
    """Calls that end the waits for a lost rank on a GPU."""
    known: Any = torch_group(group)
    backend = known._get_backend(torch.device("cuda"))
    return [backend.abort] if peers is None else [peers.stop, backend.abort]


def _end_sums(group: Collectives, device: torch.device) -> None:
    """Wait until no rank uses the memory of another one."""
    release_captures()
    torch.cuda.synchronize(device)
    group.gathered(torch.zeros(1))


def _create_group(
    launch: LaunchedRank, device: torch.device, watchdog: RankWatchdog, timeout_s: float
) -> Collectives:
    """Connect the watchdogs of all ranks and create their group; LostRankError if a rank is missing."""
    distributed, timeout = torch.distributed, timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        rendezvous = distributed.rendezvous(  # type: ignore[attr-defined]  # documented, but not in the stubs
            "env://", launch.rank(), launch.size(), timeout=timeout
        )
        store, rank, world = next(iter(rendezvous))
        store.set_timeout(timeout)
        watchdog.start(store, launch.address, timeout_s)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except QloadError:  # of a rank that did not connect, or the error of another rank
        watchdog.stop()
        raise
    except (RuntimeError, ValueError) as error:
        watchdog.stop()
        raise LostRankError(None, launch.size(), f"the ranks did not meet: {error}") from error
    world_group: Any = distributed.group.WORLD
    return collectives_of(world_group)


def _root_cause(error: BaseException, interrupt: Interrupt) -> BaseException:
    """Return the error of the lost rank for a failed collective, or else the error itself."""
    if isinstance(error, LostRankError) and error.rank is None:
        interrupt.wait(WATCHDOG_WAIT_S)
    return interrupt.error or error


@checked
def agree(group: ProcessGroup, error: QloadError | None) -> None:
    """Raise the error of the first rank with one on every rank of `group`; without errors it returns.

    For errors that only one rank may have, such as a missing file on its machine: before each rank reads
    weights it passes its `error` or None, and either all ranks continue or none.

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
    message = b"" if error is None else serialize_error(error, group.rank(), group.size())
    sizes = ranks.gathered(torch.tensor([len(message)])).tolist()
    if not any(sizes):
        return
    padded = torch.tensor([*message, *bytes(max(sizes) - len(message))], dtype=torch.uint8)
    first = next(rank for rank, size in enumerate(sizes) if size)
    chosen: Tensor = ranks.gathered(padded[None], dim=0)[first, : sizes[first]]
    raise deserialize_error(bytes(chosen.tolist()), first, group.size())
