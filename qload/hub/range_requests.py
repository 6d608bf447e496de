"""Range requests to the Hugging Face hub, and its refusals as errors of qload.

Requests use the connection and the headers of huggingface_hub. A server is untrusted: no more than the
requested bytes are read, and an answer with another length or range is an error.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from threading import Lock
from time import sleep
from typing import Any

from qload.errors import ArgumentError, QloadError, StorageError
from qload.errors.exceptions import HubUnreachableError

LOGIN_REMEDY = "log in by `hf auth login`, as an account with access to it"
RETRY_REMEDY = "try again later"
TIMEOUT_S = 30.0  # of a request without an answer
RETRY_PAUSES_S = (0.5, 2.0)  # before the second and the third request
CHUNK_BYTES = 1 << 16


def require_huggingface_hub(name: str) -> None:
    """Raise ArgumentError with the command to install huggingface_hub if it is missing."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        expected = (
            "an existing path, or huggingface_hub installed for a model of the hub: "
            "pip install 'qload-weights[hub]'"
        )
        raise ArgumentError(name, expected, f"neither ({_error_line(error)})") from error


def unreadable_error(name: str, detail: str, remedy: str = "") -> StorageError:
    """Create the error for an unreadable model or file of the hub."""
    return StorageError(name, "unreadable", detail, remedy=remedy)


@contextmanager
def translate_errors(model: str, revision: str, file: str = "") -> Iterator[None]:
    """Turn any error of huggingface_hub inside the block into a StorageError about the model or the file.

    Its versions raise errors of three HTTP libraries without a common base class.
    """
    from huggingface_hub import errors as hub_errors

    try:
        yield
    except QloadError:
        raise
    except hub_errors.GatedRepoError as error:
        raise unreadable_error(model, "is gated: the hub requires a login", LOGIN_REMEDY) from error
    except hub_errors.RepositoryNotFoundError as error:
        detail = "no such path, and no such model on the hub with access for this account"
        remedy = f"check the spelling; if it is private, {LOGIN_REMEDY}"
        raise StorageError(model, "no-files", detail, remedy=remedy) from error
    except hub_errors.RevisionNotFoundError as error:
        detail = f"has no revision {revision!r} on the hub"
        raise StorageError(model, "no-files", detail, remedy="name a branch, a tag or a commit") from error
    except hub_errors.OfflineModeIsEnabled as error:
        detail = "HF_HUB_OFFLINE forbids requests to the hub"
        raise HubUnreachableError(model, "unreadable", detail, remedy="unset HF_HUB_OFFLINE") from error
    except Exception as error:
        raise _server_error(file or model, error) from error


def _server_error(name: str, error: Exception) -> StorageError:
    """Create the error for a failed request: HubUnreachableError if a retry can help."""
    cause = error.__cause__ or error  # a download wraps the error of its request
    status = getattr(getattr(cause, "response", None), "status_code", None)
    answer = f"gave no answer: {_error_line(cause)}" if status is None else f"answered with status {status}"
    if status is None or status == 429 or status >= 500:
        return HubUnreachableError(name, "unreadable", f"the hub {answer}", remedy=RETRY_REMEDY)
    return unreadable_error(name, f"the hub {answer}")


def _error_line(error: BaseException) -> str:
    """Format an error of another library as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.240}"


@dataclass
class Traffic:
    """Number of requests, and bytes of content transferred so far."""

    requests: int = 0
    content: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, count: int) -> None:
        """Count a request with `count` bytes of content."""
        with self._lock:
            self.requests += 1
            self.content += count


@dataclass(frozen=True)
class HubFile:
    """File of a model at one commit, with constant content; a `RemoteFile`."""

    model: str
    commit: str
    name: str
    size: int
    traffic: Traffic

    @property
    def url(self) -> str:
        """Address of the file; the hub may redirect it."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.model, self.name, revision=self.commit)

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer from byte `at` on; StorageError if the server sends anything else."""
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
        is_whole = at == 0 and count == self.size
        received = 0
        try:
            with (
                translate_errors(self.model, self.commit, self.name),
                _open_response(self.url, None if is_whole else f"bytes={at}-{last}") as response,
            ):
                self._check(response, "" if is_whole else f"bytes {at}-{last}/{self.size}")
                for chunk in _raw_chunks(response):
                    target = buffer[received : received + len(chunk)]
                    received += len(chunk)
                    if received > count:
                        detail = f"the server sent more than the {count} requested bytes"
                        raise unreadable_error(self.name, detail)
                    target[:] = chunk
        finally:
            self.traffic.add(received)
        if received < count:
            detail = f"the server sent {received} of the {count} bytes from {at} on"
            raise StorageError(self.name, "file-length", detail, remedy=RETRY_REMEDY)

    def _check(self, response: Any, content_range: str) -> None:
        """Check the status and the range of a response; `content_range` is "" for the whole file."""
        status, received = response.status_code, response.headers.get("Content-Range", "")
        if self.url.startswith("https:") and not str(response.url).startswith("https:"):
            raise unreadable_error(self.name, "the server redirects from https to an unencrypted address")
        if status == 200 and content_range:
            raise unreadable_error(self.name, "the server does not support ranges: it sent the whole file")
        if status != (206 if content_range else 200):
            raise unreadable_error(self.name, f"the server answered with status {status}", RETRY_REMEDY)
        if content_range and " ".join(received.split()) != content_range:
            detail = f"the server sent the range {received!r:.80}, expected {content_range!r}"
            raise unreadable_error(self.name, detail)


@contextmanager
def _open_response(url: str, byte_range: str | None) -> Iterator[Any]:
    """Open the response to a GET request; its content is not read yet."""
    utils: Any = import_module("huggingface_hub.utils")
    headers: Mapping[str, str] = utils.build_hf_headers(library_name="qload")
    headers = {**headers, "Accept-Encoding": "identity"} | ({"Range": byte_range} if byte_range else {})
    session: Any = utils.get_session()  # requests before version 1 of huggingface_hub, httpx since then
    if callable(session.stream):
        opened = session.stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True)
    else:
        opened = session.get(url, headers=headers, timeout=TIMEOUT_S, stream=True)
    with opened as response:
        utils.hf_raise_for_status(response)
        yield response


def _raw_chunks(response: Any) -> Iterator[bytes]:
    """Yield the content as sent, never decompressed: a few bytes could expand to many."""
    if hasattr(response, "iter_raw"):
        yield from response.iter_raw(CHUNK_BYTES)
    else:
        yield from response.raw.stream(CHUNK_BYTES, decode_content=False)
