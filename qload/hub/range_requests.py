"""Range requests to the Hugging Face hub, and its refusals as errors of qload."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from threading import Lock
from time import sleep
from typing import Any

from qload.errors import ArgumentError, QloadError, StorageError
from qload.errors.exceptions import HubUnreachableError

LOGIN_REMEDY = "log in by `hf auth login`, as an account that may read it"
RETRY_REMEDY = "try again later"


def require_huggingface_hub(name: str) -> None:
    """ArgumentError with the way to install it, where huggingface_hub is not here."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        expected = (
            "a path that is there, or huggingface_hub installed to look for it on the hub: "
            "pip install 'qload-weights[hub]'"
        )
        raise ArgumentError(name, expected, f"neither ({_error_line(error)})") from error


def unreadable_error(name: str, words: str, remedy: str = "") -> StorageError:
    """The error for what cannot be read from the hub."""
    return StorageError(name, "unreadable", words, remedy=remedy)


@contextmanager
def translate_errors(model: str, revision: str, file: str = "") -> Iterator[None]:
    """Inside, whatever huggingface_hub raises becomes a StorageError about the model or a file of it.

    Its versions raise the errors of three libraries for HTTP, which have no base in common.
    """
    from huggingface_hub import errors as theirs

    try:
        yield
    except QloadError:
        raise
    except theirs.GatedRepoError as error:
        raise unreadable_error(model, "is gated: the hub asks who reads it", LOGIN_REMEDY) from error
    except theirs.RepositoryNotFoundError as error:
        words = "there is no such path here, and no such model on the hub that you may read"
        remedy = f"check the spelling; if it is private, {LOGIN_REMEDY}"
        raise StorageError(model, "no-files", words, remedy=remedy) from error
    except theirs.RevisionNotFoundError as error:
        words = f"has no revision {revision!r} on the hub"
        raise StorageError(model, "no-files", words, remedy="name a branch, a tag or a commit") from error
    except theirs.OfflineModeIsEnabled as error:
        words = "HF_HUB_OFFLINE forbids to ask the hub"
        raise HubUnreachableError(model, "unreadable", words, remedy="unset HF_HUB_OFFLINE") from error
    except Exception as error:
        raise _server_error(file or model, error) from error


def _server_error(name: str, error: Exception) -> StorageError:
    """An answer that is no content, or none at all: worth another try, or not."""
    cause = error.__cause__ or error  # what its download says is in the cause
    status = getattr(getattr(cause, "response", None), "status_code", None)
    words = f"gave no answer: {_error_line(cause)}" if status is None else f"answered with status {status}"
    if status is None or status == 429 or status >= 500:
        return HubUnreachableError(name, "unreadable", f"the hub {words}", remedy=RETRY_REMEDY)
    return unreadable_error(name, f"the hub {words}")


def _error_line(error: BaseException) -> str:
    """An error of another library as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.240}"


TIMEOUT_S = 30.0  # seconds without an answer
RETRY_PAUSES_S = (0.5, 2.0)  # seconds, after a first and a second answer that was none, or one such as 503
CHUNK_BYTES = 1 << 16


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
        for pause in RETRY_PAUSES_S:
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
                translate_errors(self.model, self.commit, self.name),
                _open_response(self.url, None if whole else f"bytes={at}-{last}") as answer,
            ):
                self._check(answer, "" if whole else f"bytes {at}-{last}/{self.size}")
                for piece in _raw_chunks(answer):
                    room = buffer[got : got + len(piece)]
                    got += len(piece)
                    if got > count:
                        raise unreadable_error(
                            self.name, f"the server sent more than the {count} bytes asked for"
                        )
                    room[:] = piece
        finally:
            self.traffic.add(got)
        if got < count:
            words = f"the server sent {got} of the {count} bytes from {at} on"
            raise StorageError(self.name, "file-length", words, remedy=RETRY_REMEDY)

    def _check(self, answer: Any, wanted: str) -> None:
        """The status and the range of an answer; `wanted` is "" for all of the file."""
        status, given = answer.status_code, answer.headers.get("Content-Range", "")
        if self.url.startswith("https:") and not str(answer.url).startswith("https:"):
            raise unreadable_error(
                self.name, "the server leads from https to an address that is not encrypted"
            )
        if status == 200 and wanted:
            raise unreadable_error(
                self.name, "the server sends whole files where a range of one was asked for"
            )
        if status != (206 if wanted else 200):
            raise unreadable_error(self.name, f"the server answered with status {status}", RETRY_REMEDY)
        if wanted and " ".join(given.split()) != wanted:
            raise unreadable_error(self.name, f"the server sent {given!r:.80} where {wanted!r} was asked for")


@contextmanager
def _open_response(url: str, wanted: str | None) -> Iterator[Any]:
    """The open answer to a GET, its content not read yet."""
    utils: Any = import_module("huggingface_hub.utils")
    headers: Mapping[str, str] = utils.build_hf_headers(library_name="qload")
    headers = {**headers, "Accept-Encoding": "identity"} | ({"Range": wanted} if wanted else {})
    session: Any = utils.get_session()  # of requests before version 1 of huggingface_hub, since then of httpx
    if callable(session.stream):
        opened = session.stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True)
    else:
        opened = session.get(url, headers=headers, timeout=TIMEOUT_S, stream=True)
    with opened as answer:
        utils.hf_raise_for_status(answer)
        yield answer


def _raw_chunks(answer: Any) -> Iterator[bytes]:
    """The content as it comes, not unpacked: a few bytes could stand for many."""
    if hasattr(answer, "iter_raw"):
        yield from answer.iter_raw(CHUNK_BYTES)
    else:
        yield from answer.raw.stream(CHUNK_BYTES, decode_content=False)
