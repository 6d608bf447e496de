"""Ranges of a file on the hub, over the connection and with the headers of huggingface_hub.

A server may answer anything: no more is read than was asked for, and an answer of another length, of another
range or of the whole file is an error.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from threading import Lock
from time import sleep
from typing import Any

from qload.errors import StorageError
from qload.errors.checkpoint import HubUnreachableError
from qload.hub.errors import LATER, refusals, unreadable

TIMEOUT = 30.0  # seconds without an answer
PAUSES = (0.5, 2.0)  # seconds, after a first and a second answer that was none, or one such as 503
PIECE = 1 << 16


@dataclass
class Traffic:
    """What was transferred so far: requests, and bytes of content."""

    requests: int = 0
    content: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, count: int) -> None:
        """One more answer, of so many bytes."""
        with self._lock:
            self.requests += 1
            self.content += count


@dataclass(frozen=True)
class HubFile:
    """A file of one commit, so that its address always means the same bytes; a `RemoteFile`."""

    model: str
    commit: str
    name: str
    size: int
    traffic: Traffic

    @property
    def url(self) -> str:
        """Where the hub has the file, or leads on from."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.model, self.name, revision=self.commit)

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer of bytes from a position on; StorageError where the server sends anything else."""
        for pause in PAUSES:
            try:
                self._fill(buffer, at)
            except HubUnreachableError:
                sleep(pause)
            else:
                return
        self._fill(buffer, at)

    def _fill(self, buffer: memoryview, at: int) -> None:
        count = len(buffer)
        if not count:
            return
        last = at + count - 1
        whole = at == 0 and count == self.size
        got = 0
        try:
            with (
                refusals(self.model, self.commit, self.name),
                _answer(self.url, None if whole else f"bytes={at}-{last}") as answer,
            ):
                self._check(answer, "" if whole else f"bytes {at}-{last}/{self.size}")
                for piece in _pieces(answer):
                    room = buffer[got : got + len(piece)]
                    got += len(piece)
                    if got > count:
                        raise unreadable(self.name, f"the server sent more than the {count} bytes asked for")
                    room[:] = piece
        finally:
            self.traffic.add(got)
        if got < count:
            words = f"the server sent {got} of the {count} bytes from {at} on"
            raise StorageError(self.name, "file-length", words, remedy=LATER)

    def _check(self, answer: Any, wanted: str) -> None:
        """The status and the range of an answer; `wanted` is "" for all of the file."""
        status, given = answer.status_code, answer.headers.get("Content-Range", "")
        if self.url.startswith("https:") and not str(answer.url).startswith("https:"):
            raise unreadable(self.name, "the server leads from https to an address that is not encrypted")
        if status == 200 and wanted:
            raise unreadable(self.name, "the server sends whole files where a range of one was asked for")
        if status != (206 if wanted else 200):
            raise unreadable(self.name, f"the server answered with status {status}", LATER)
        if wanted and " ".join(given.split()) != wanted:
            raise unreadable(self.name, f"the server sent {given!r:.80} where {wanted!r} was asked for")


@contextmanager
def _answer(url: str, wanted: str | None) -> Iterator[Any]:
    """The open answer to a GET, its content not read yet."""
    utils: Any = import_module("huggingface_hub.utils")
    headers: Mapping[str, str] = utils.build_hf_headers(library_name="qload")
    headers = {**headers, "Accept-Encoding": "identity"} | ({"Range": wanted} if wanted else {})
    session: Any = utils.get_session()  # of requests before version 1 of huggingface_hub, since then of httpx
    if callable(session.stream):
        opened = session.stream("GET", url, headers=headers, timeout=TIMEOUT, follow_redirects=True)
    else:
        opened = session.get(url, headers=headers, timeout=TIMEOUT, stream=True)
    with opened as answer:
        utils.hf_raise_for_status(answer)
        yield answer


def _pieces(answer: Any) -> Iterator[bytes]:
    """The content as it comes, not unpacked: a few bytes could stand for many."""
    if hasattr(answer, "iter_raw"):
        yield from answer.iter_raw(PIECE)
    else:
        yield from answer.raw.stream(PIECE, decode_content=False)
