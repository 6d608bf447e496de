"""The other processes of a world, watched: one that ends says so, and one that dies is missed at once.

Every rank holds a connection to rank 0, which passes on what it hears. A connection that closes without a
word is that of a process which is gone: the operating system closes it, however busy the process was. A
machine that is gone is missed after `SILENCE_S`.
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

MAX_ERROR_BYTES = 1 << 16  # bytes of an error; a longer one is told in words


def serialize_error(error: BaseException, rank: int, world: int) -> bytes:
    """An error of a rank as bytes, at most `MOST`."""
    if isinstance(error, QloadError):
        said = pickle.dumps(error)
        if len(said) <= MAX_ERROR_BYTES:
            return said
    words = f"it ended with {type(error).__name__}: {error}"
    return pickle.dumps(LostRankError(rank, world, words[: MAX_ERROR_BYTES // 8]))


def deserialize_error(said: bytes, rank: int, world: int) -> QloadError:
    """The error that another rank told; bytes that are none become a `LostRankError` of that rank."""
    try:
        error = _ErrorUnpickler(io.BytesIO(said)).load()
    except Exception:  # whatever a pickle raises that is none of ours
        error = None
    if isinstance(error, QloadError):
        return error
    return LostRankError(rank, world, "what it said is no error of qload")


class _ErrorUnpickler(pickle.Unpickler):
    """Makes errors of qload, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.startswith("qload.errors.") else None
        if not (isinstance(found, type) and issubclass(found, QloadError)):
            raise pickle.UnpicklingError(f"{module}.{name}: no error of qload")
        return found


log: logging.Logger = logging.getLogger("qload")

MAX_SILENCE_S = 20  # of a machine, before its connections count as closed
STORE_KEY = "qload/watch"
LEFT_MESSAGE = b""  # the message of a rank that has come to its end
PROCESS_ENDED = "its process ended"


class Store(Protocol):
    """What is asked of a `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Tell all ranks a value."""

    def get(self, key: str) -> bytes:
        """The value, once a rank has told it."""


class RankWatchdog:
    """Watches the ranks of a world from a thread, and calls `lost` with what ended the first that failed.

    Parameters
    ----------
    rank, world
        Which rank this is, and of how many.
    lost
        Called once, in the thread of the watch.
    """

    def __init__(self, rank: int, world: int, lost: Callable[[QloadError], None]) -> None:
        self.rank, self.world = rank, world
        self._lost = lost
        self._peers: dict[socket.socket, int] = {}
        self._waker, self._woken = socket.socketpair()
        self._thread = Thread(target=self._watch, name="qload-watch", daemon=True)

    def start(self, store: Store, host: str, timeout_s: float) -> None:
        """Connect with the ranks, rank 0 being on `host`; LostRankError for one that stays away."""
        try:
            if self.rank == 0:
                self._accept(store, host, time.monotonic() + timeout_s)
            else:
                self._connect(store, timeout_s)
        except OSError as error:
            absent = sorted({*range(1, self.world)} - {*self._peers.values()}) if self.rank == 0 else [0]
            self.stop()
            raise LostRankError(absent[0], self.world, f"it did not come: {error}") from error
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """Tell the other ranks that this one has come to its end, or what ended it; and watch no longer."""
        self._halt()
        self._tell(LEFT_MESSAGE if error is None else serialize_error(error, self.rank, self.world))
        self.stop()

    def stop(self) -> None:
        """Let go of all connections."""
        self._halt()
        for each in (*self._peers, self._woken):
            each.close()
        self._peers.clear()

    def _halt(self) -> None:
        self._waker.close()  # which wakes the thread
        if self._thread.is_alive():
            self._thread.join()

    def _accept(self, store: Store, host: str, until: float) -> None:
        """Of rank 0: a connection from every other rank, which shows the word that the store tells ranks."""
        word = secrets.token_hex(16).encode()
        with _create_server(host) as server:
            store.set(STORE_KEY, f"{server.getsockname()[1]} {host} {word.decode()}")
            while len(self._peers) < self.world - 1:
                server.settimeout(max(until - time.monotonic(), 0.001))
                peer, _ = server.accept()
                peer.settimeout(max(until - time.monotonic(), 0.001))
                rank = _parse_greeting(_receive_message(peer), word)
                if rank is None or rank in self._peers.values() or not 0 < rank < self.world:
                    peer.close()  # a stranger
                    continue
                self._peers[_enable_keepalive(peer)] = rank

    def _connect(self, store: Store, timeout_s: float) -> None:
        port, host, word = store.get(STORE_KEY).decode().split(" ")
        peer = socket.create_connection((host, int(port)), timeout_s)
        _send_message(peer, f"{word} {self.rank}".encode())
        self._peers[_enable_keepalive(peer)] = 0

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in (*self._peers, self._woken):
                selector.register(each, selectors.EVENT_READ)
            while self._peers:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        return
                    peer = next(each for each in self._peers if each is key.fileobj)
                    error = self._heard(peer)
                    selector.unregister(peer)
                    if error is None:
                        peer.close()
                        del self._peers[peer]
                        continue
                    if self.rank == 0:
                        self._tell(serialize_error(error, self.rank, self.world))
                    self._lost(error)
                    return

    def _heard(self, peer: socket.socket) -> QloadError | None:
        """What a rank has said: that it has left (None), or what ended it."""
        rank = self._peers[peer]
        try:
            said = _receive_message(peer)
        except OSError:
            return LostRankError(rank, self.world, PROCESS_ENDED)
        return None if said == LEFT_MESSAGE else deserialize_error(said, rank, self.world)

    def _tell(self, said: bytes) -> None:
        for peer in self._peers:
            with suppress(OSError):  # of one that is gone too
                _send_message(peer, said)


def _create_server(host: str) -> socket.socket:
    """A place to connect to: at the address that all ranks know, or at any of this machine."""
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", 0))


def _parse_greeting(said: bytes, word: bytes) -> int | None:
    """The rank that a connection says it is; None where it does not know the word."""
    shown, _, rank = said.partition(b" ")
    known = secrets.compare_digest(shown, word) and rank.isdigit()
    return int(rank[:8]) if known else None


def _enable_keepalive(peer: socket.socket) -> socket.socket:
    """A connection on which silence of the other machine is an error after a while."""
    peer.settimeout(MAX_SILENCE_S)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", MAX_SILENCE_S // 5 - 1)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return peer


def _send_message(peer: socket.socket, said: bytes) -> None:
    peer.sendall(len(said).to_bytes(4, "big") + said)


def _receive_message(peer: socket.socket) -> bytes:
    """One message; ConnectionError for an end without one, and for one that is too long."""
    size = int.from_bytes(_receive_bytes(peer, 4), "big")
    if size > 2 * MAX_ERROR_BYTES:
        raise ConnectionError(f"a message of {size} bytes")
    return _receive_bytes(peer, size)


def _receive_bytes(peer: socket.socket, size: int) -> bytes:
    read = bytearray()
    while len(read) < size:
        more = peer.recv(size - len(read))
        if not more:
            raise ConnectionError("the connection was closed")
        read += more
    return bytes(read)
