"""Models of the Hugging Face hub, by id: the only package that uses the network.

The library huggingface_hub, imported on the first call, provides the endpoint, the token and the cache. A
string passed to `qload.inspect`, `verify` or `open_checkpoint` is always a path; a model of the hub is opened
first:

    with open_folder(HubId("org/model")) as folder:
        report = qload.inspect(folder)

Ranges of a file are read over the connection of huggingface_hub, with its headers. Answers are hostile input:
no byte beyond the request is read, and another length, another range or the whole file is an error.
"""

import glob
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from time import sleep
from typing import Any

from qload.detect.config_reader import CONFIGS, MAX_BYTES
from qload.errors import ArgumentError, QloadError, StorageError
from qload.errors.exceptions import HubUnreachableError
from qload.storage import RemoteFolder, locate, read_whole
from qload.storage.checkpoint_files import INDEX, MAX_INDEX, SUFFIX
from qload.storage.files import read_range

__all__ = ["HubFolder", "HubId", "cached_folder", "fetch", "open_folder", "parse_id"]

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
    _lock: Lock = field(default_factory=Lock)

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


_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_REVISION = r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,254}"
_ID = re.compile(rf"({_NAME}/{_NAME})(?:@({_REVISION}))?")
_FILE_SUFFIXES = (".safetensors", ".json")  # of paths, never of model names
MAX_FILES = 100_000
LISTING_TIMEOUT_S = 30.0
HEX_DIGITS = frozenset("0123456789abcdef")

_log = logging.getLogger("qload")


@dataclass(frozen=True)
class HubId:
    """Id of a model of the hub, with a branch, tag or commit; None is the branch `main`."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def wanted(self) -> str:
        """Name of the revision."""
        return self.revision or "main"


def parse_id(text: str) -> HubId | None:
    """Parse `org/model[@revision]`; None for a path.

    A path exists, begins with a dot, a slash or a tilde, has several slashes before `@`, or ends with the
    suffix of a file. `folder/model` is a path too if `folder` is a directory; `folder/model@main` is not.
    """
    match = _ID.fullmatch(text)
    if match is None or os.path.lexists(text):
        return None
    repo, revision = match[1], match[2]
    if repo.endswith(_FILE_SUFFIXES) or ".." in text or "--" in repo:  # invalid in names of the hub
        return None
    if revision is None and os.path.isdir(repo.partition("/")[0]):
        return None
    return HubId(repo, revision)


@dataclass(frozen=True)
class HubListing:
    """Files of a model at one commit: name -> length in bytes."""

    repo: str
    commit: str
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit}"

    def cached(self, name: str) -> Path | None:
        """Return the path of a file in the local cache, or None if it is missing or incomplete."""
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.repo, name, revision=self.commit)
        if not isinstance(cached, str):
            return None
        path = Path(cached)
        try:
            return path if path.stat().st_size == self.sizes[name] else None
        except OSError:
            return None


def list_files(model: HubId) -> HubListing:
    """List the files of a model in one request.

    StorageError if the hub refuses, HubUnreachableError if it does not answer.
    """
    from huggingface_hub import HfApi

    with translate_errors(str(model), model.wanted):
        info = HfApi(library_name="qload").model_info(
            model.repo, revision=model.wanted, files_metadata=True, timeout=LISTING_TIMEOUT_S
        )
        commit, siblings = info.sha, info.siblings or []
    if not isinstance(commit, str) or len(commit) != 40 or not HEX_DIGITS.issuperset(commit):
        raise unreadable_error(str(model), f"the hub returned an invalid commit: {commit!r:.80}")
    if len(siblings) > MAX_FILES:
        raise unreadable_error(str(model), f"has {len(siblings)} files on the hub, more than {MAX_FILES}")
    sizes: dict[str, Any] = {file.rfilename: file.size for file in siblings if _is_safe_name(file.rfilename)}
    if invalid := [name for name, size in sizes.items() if type(size) is not int or size < 0]:
        raise unreadable_error(str(model), f"the hub returned an invalid length of its file {invalid[0]:.80}")
    return HubListing(model.repo, commit, sizes)


def _is_safe_name(name: object) -> bool:
    """Return True for the relative path of a file within the model's folder, valid on every system."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > 250:
        return False
    return not set(name) & set('\\:*?"<>|') and all(part.strip(". ") for part in name.split("/"))


@dataclass(frozen=True)
class HubFolder(RemoteFolder):
    """Folder of a model of the hub at one commit.

    Attributes
    ----------
    name, folder, places
        Attributes of `RemoteFolder`.
    listing
        The commit and all of its files.
    traffic
        Requests and bytes transferred so far.
    """

    listing: HubListing
    traffic: Traffic


@contextmanager
def open_folder(model: HubId) -> Iterator[HubFolder]:
    """Open a model as a folder: configs and indexes are local, tensor files cached or read by ranges.

    The folder exists until the block ends. StorageError if the hub refuses, HubUnreachableError if it does
    not answer, ArgumentError if huggingface_hub is not installed.
    """
    require_huggingface_hub(str(model))
    listing, traffic = list_files(model), Traffic()
    with TemporaryDirectory(prefix="qload-hub-") as directory:
        folder = Path(directory)
        places = {
            name: listing.cached(name) or _remote_file(listing, name, traffic)
            for name in listing.sizes
            if name.endswith(SUFFIX)
        }
        for name in listing.sizes:
            if name.endswith(SUFFIX) or "/" not in name:
                _write_file(folder / name, _read_json(listing, name, traffic))
        yield HubFolder(str(listing), folder, places, listing, traffic)


def fetch(model: HubId, folder: HubFolder, tell: Callable[[str], None] = _log.info) -> HubFolder:
    """Fetch all tensor files of a folder into the cache of huggingface_hub, and return the folder.

    `tell` is called with a sentence about the size of the download before it starts. ArgumentError if the
    disk is too full.
    """
    from huggingface_hub import snapshot_download

    try:
        needed = locate(folder).files
    except StorageError:
        return folder  # unreadable; the report has the reason
    listing = folder.listing
    missing = [name for name in needed if listing.cached(name) is None]
    if missing:
        size = sum(listing.sizes[name] for name in missing)
        _check_disk_space(model, size)
        tell(f"fetching {size} bytes of {model} into the cache, in {len(missing)} files")
        names = [*missing, *(name for name in listing.sizes if _is_json(name))]
        with translate_errors(str(model), model.wanted):
            snapshot = snapshot_download(
                model.repo, revision=model.wanted, allow_patterns=[glob.escape(name) for name in names]
            )
        if Path(snapshot).name != listing.commit:
            detail = f"changed on the hub from commit {listing.commit} to {Path(snapshot).name} meanwhile"
            raise unreadable_error(str(model), detail, "run it again")
    places = {name: _cached_path(listing, name) for name in needed}
    return replace(folder, places={**folder.places, **places})


def cached_folder(model: HubId, why: HubUnreachableError) -> RemoteFolder:
    """Return the snapshot of a model in the local cache, without a request; StorageError if there is none.

    `why`: the reason to use the cache, part of this error.
    """
    from huggingface_hub import errors, snapshot_download

    remedy = f"{why.remedy}, or fetch the model with access to the hub: hf download {model.repo}"
    patterns = [*CONFIGS, f"*{INDEX}"]
    try:
        with translate_errors(str(model), model.wanted):
            snapshot = snapshot_download(
                model.repo, revision=model.wanted, local_files_only=True, allow_patterns=patterns
            )
    except StorageError as error:
        if not isinstance(error.__cause__, errors.LocalEntryNotFoundError):
            raise
        detail = f"no such path, {why.detail}, and the local cache has no snapshot of it"
        raise unreadable_error(str(model), detail, remedy) from why
    folder = Path(snapshot)
    try:
        locate(folder)
    except StorageError as error:
        detail = f"{why.detail}, and the local cache has only a part of it: {error.detail}"
        raise unreadable_error(str(model), detail, remedy) from error
    return RemoteFolder(f"{model.repo}@{folder.name}", folder, {})


def _remote_file(listing: HubListing, name: str, traffic: Traffic) -> HubFile:
    return HubFile(listing.repo, listing.commit, name, listing.sizes[name], traffic)


def _cached_path(listing: HubListing, name: str) -> Path:
    path = listing.cached(name)
    if path is None:
        detail = f"was fetched, but the cache has no file of its length of {listing.sizes[name]} bytes"
        raise StorageError(name, "file-length", detail, remedy="run it again")
    return path


def _is_json(name: str) -> bool:
    """Return True for a config or an index in the model's top folder."""
    return name in CONFIGS or (name.endswith(INDEX) and "/" not in name)


def _read_json(listing: HubListing, name: str, traffic: Traffic) -> bytes:
    """Read a config or an index from the cache or the hub; b"" for any other file."""
    if not _is_json(name):
        return b""
    size, limit = listing.sizes[name], MAX_INDEX if name.endswith(INDEX) else MAX_BYTES
    if size > limit:
        raise unreadable_error(name, f"{size} bytes long, larger than {limit}")
    path = listing.cached(name)
    if path is not None:
        return read_whole(path, name, limit, "unreadable")
    return read_range(_remote_file(listing, name, traffic), 0, size)


def _write_file(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        detail = f"cannot be written to a temporary folder: {error.strerror or error}"
        raise unreadable_error(path.name, detail) from error


def _check_disk_space(model: HubId, needed: int) -> None:
    """Raise ArgumentError if the disk of the cache has fewer free bytes than needed."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ArgumentError(HF_HUB_CACHE, f"{needed} bytes free, for the files of {model}", f"{free} bytes")
