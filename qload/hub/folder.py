"""A model of the Hugging Face hub as a folder: its id, its files at one commit, and their local copies."""

import glob
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from qload.detect.files import CONFIGS, MAX_BYTES
from qload.errors import ArgumentError, StorageError
from qload.errors.exceptions import HubUnreachableError
from qload.hub.range_requests import (
    HubFile,
    Traffic,
    require_huggingface_hub,
    translate_errors,
    unreadable_error,
)
from qload.storage import Place, RemoteFolder, locate, read_whole
from qload.storage.checkpoint_files import INDEX, MAX_INDEX, SUFFIX
from qload.storage.files import read_range

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_REVISION = r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,254}"
_ID = re.compile(rf"({_NAME}/{_NAME})(?:@({_REVISION}))?")
_FILE_SUFFIXES = (".safetensors", ".json")  # what ends so was meant as a file


@dataclass(frozen=True, slots=True)
class HubId:
    """A model of the hub, and a branch, a tag or a commit of it; None is the branch `main`."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def wanted(self) -> str:
        """The revision, spelled out."""
        return self.revision or "main"


def parse_id(text: str) -> HubId | None:
    """`org/model[@revision]`, where the text is that and no path that is there; else None.

    What begins with a dot, a slash or a tilde, has more than one slash before `@`, or ends as a file does is
    a path. So is `here/model` where `here` is a directory; `here/model@main` is not.
    """
    found = _ID.fullmatch(text)
    if found is None or os.path.lexists(text):
        return None
    repo, revision = found[1], found[2]
    if repo.endswith(_FILE_SUFFIXES) or ".." in text or "--" in repo:  # which no name on the hub has
        return None
    if revision is None and os.path.isdir(repo.partition("/")[0]):
        return None
    return HubId(repo, revision)


MAX_FILES = 100_000
LISTING_TIMEOUT_S = 30.0  # seconds
HEX_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class HubListing:
    """The files of a model at one commit, with their lengths in bytes."""

    repo: str
    commit: str
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit}"

    def cached(self, name: str) -> Path | None:
        """A file as the local cache holds it, if it is there in its whole length."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, name, revision=self.commit)
        if not isinstance(found, str):
            return None
        place = Path(found)
        try:
            return place if place.stat().st_size == self.sizes[name] else None
        except OSError:
            return None


def list_files(model: HubId) -> HubListing:
    """One question to the hub; StorageError where it refuses, HubUnreachableError where nobody answers."""
    from huggingface_hub import HfApi

    with translate_errors(str(model), model.wanted):
        info = HfApi(library_name="qload").model_info(
            model.repo, revision=model.wanted, files_metadata=True, timeout=LISTING_TIMEOUT_S
        )
        commit, siblings = info.sha, info.siblings or []
    if not isinstance(commit, str) or len(commit) != 40 or not HEX_DIGITS.issuperset(commit):
        raise unreadable_error(str(model), f"the hub names no commit of it: {commit!r:.80}")
    if len(siblings) > MAX_FILES:
        raise unreadable_error(str(model), f"has {len(siblings)} files on the hub, more than {MAX_FILES}")
    sizes = {one.rfilename: one.size for one in siblings if _is_safe_name(one.rfilename)}
    if unknown := [name for name, size in sizes.items() if type(size) is not int or size < 0]:
        raise unreadable_error(str(model), f"the hub names no length of its file {unknown[0]:.80}")
    return HubListing(model.repo, commit, {name: size for name, size in sizes.items() if size is not None})


def _is_safe_name(name: object) -> bool:
    """Whether a name is that of a file in the model's folder or in one below, on every system."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > 250:
        return False
    return not set(name) & set('\\:*?"<>|') and all(part.strip(". ") for part in name.split("/"))


_log = logging.getLogger("qload")


@dataclass(frozen=True)
class HubFolder(RemoteFolder):
    """A model of the hub at one commit.

    Attributes
    ----------
    name, folder, places
        Those of `RemoteFolder`.
    listing
        The commit, and all files that it has.
    traffic
        What was transferred of them so far.
    """

    listing: HubListing
    traffic: Traffic


@contextmanager
def open_folder(model: HubId) -> Iterator[HubFolder]:
    """The model as a folder, for as long as the context lasts; what the cache has of it is read from there.

    StorageError where the hub refuses, HubUnreachableError where nobody answers, ArgumentError where
    huggingface_hub is not installed.
    """
    require_huggingface_hub(str(model))
    listing, traffic = list_files(model), Traffic()
    with TemporaryDirectory(prefix="qload-hub-") as directory:
        folder = Path(directory)
        places = {
            name: _locate_file(listing, name, traffic) for name in listing.sizes if name.endswith(SUFFIX)
        }
        for name in listing.sizes:
            if name.endswith(SUFFIX) or "/" not in name:
                _write_file(folder / name, _read_json(listing, name, traffic))
        yield HubFolder(str(listing), folder, places, listing, traffic)


def fetch(model: HubId, folder: HubFolder, tell: Callable[[str], None] = _log.info) -> HubFolder:
    """The same folder, once all files that it is read from are in the cache of huggingface_hub.

    `tell` is called with a sentence that says how much is fetched, before it is. ArgumentError where the disk
    has no room for it.
    """
    from huggingface_hub import snapshot_download

    try:
        needed = locate(folder).files
    except StorageError:
        return folder  # with what is there now it cannot be read, and a report will say why
    listing = folder.listing
    missing = [name for name in needed if listing.cached(name) is None]
    if missing:
        needs = sum(listing.sizes[name] for name in missing)
        _check_disk_space(model, needs)
        tell(f"fetching {needs} bytes of {model} into the cache, in {len(missing)} files")
        wanted = [*missing, *(name for name in listing.sizes if _is_json(name))]
        with translate_errors(str(model), model.wanted):
            place = snapshot_download(
                model.repo, revision=model.wanted, allow_patterns=[glob.escape(name) for name in wanted]
            )
        if Path(place).name != listing.commit:
            words = f"changed on the hub from commit {listing.commit} to {Path(place).name} meanwhile"
            raise unreadable_error(str(model), words, "run it again")
    places = {name: _cached_path(listing, name) for name in needed}
    return replace(folder, places={**folder.places, **places})


def cached_folder(model: HubId, why: HubUnreachableError) -> RemoteFolder:
    """The snapshot that the cache has of a model, without a question to the hub; StorageError if it has none.

    `why`: the hub was not asked or did not answer, as the error then says.
    """
    from huggingface_hub import errors, snapshot_download

    remedy = f"{why.remedy}, or fetch the model where the hub is reached: hf download {model.repo}"
    try:
        with translate_errors(str(model), model.wanted):
            place = Path(
                snapshot_download(
                    model.repo,
                    revision=model.wanted,
                    local_files_only=True,
                    allow_patterns=[*CONFIGS, f"*{INDEX}"],
                )
            )
    except StorageError as error:
        if not isinstance(error.__cause__, errors.LocalEntryNotFoundError):
            raise
        words = f"there is no such path here, {why.detail}, and the local cache has no snapshot of it"
        raise unreadable_error(str(model), words, remedy) from why
    try:
        locate(place)
    except StorageError as error:
        words = f"{why.detail}, and the local cache has only a part of it: {error.detail}"
        raise unreadable_error(str(model), words, remedy) from error
    return RemoteFolder(f"{model.repo}@{place.name}", place, {})


def _locate_file(listing: HubListing, name: str, traffic: Traffic) -> Place:
    """Where a tensor file is read."""
    return listing.cached(name) or _remote_file(listing, name, traffic)


def _remote_file(listing: HubListing, name: str, traffic: Traffic) -> HubFile:
    return HubFile(listing.repo, listing.commit, name, listing.sizes[name], traffic)


def _cached_path(listing: HubListing, name: str) -> Path:
    place = listing.cached(name)
    if place is None:
        words = f"was fetched, and the cache does not have it in its length of {listing.sizes[name]} bytes"
        raise StorageError(name, "file-length", words, remedy="run it again")
    return place


def _is_json(name: str) -> bool:
    """Whether a file of the model's own folder is JSON that is read."""
    return name in CONFIGS or (name.endswith(INDEX) and "/" not in name)


def _read_json(listing: HubListing, name: str, traffic: Traffic) -> bytes:
    """What is in a file if it is JSON that is read, from the cache or from the hub; else nothing."""
    if not _is_json(name):
        return b""
    size, limit = listing.sizes[name], MAX_INDEX if name.endswith(INDEX) else MAX_BYTES
    if size > limit:
        raise unreadable_error(name, f"{size} bytes long, larger than {limit}")
    place = listing.cached(name)
    if place is not None:
        return read_whole(place, name, limit, "unreadable")
    return read_range(_remote_file(listing, name, traffic), 0, size)


def _write_file(place: Path, content: bytes) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    except OSError as error:
        words = f"cannot be written to a folder here: {error.strerror or error}"
        raise unreadable_error(place.name, words) from error


def _check_disk_space(model: HubId, needed: int) -> None:
    """ArgumentError where the cache's disk has fewer bytes left than are to be fetched."""
    from huggingface_hub.constants import HF_HUB_CACHE

    there = Path(HF_HUB_CACHE).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ArgumentError(HF_HUB_CACHE, f"{needed} bytes free, for the files of {model}", f"{free} bytes")
