"""Watchdog over the processes of a world: errors and deaths of ranks are reported to all others.

Every rank has a connection to rank 0, which forwards errors. A connection that closes without a message
belongs to a dead process: the operating system closes it at once. A dead machine is noticed after
`MAX_SILENCE_S`.
"""

import io
import logging
import pickle
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, Protocol

from qload.errors import LostRankError, QloadError

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
            raise pickle.UnpicklingError(f"{module}.{name}: not an error of qload")
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
