"""A model of the hub as a folder: JSON that is here, tensor files read by ranges or fetched to the cache."""

import glob
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from qload.detect.files import CONFIGS, MAX_BYTES
from qload.errors import ArgumentError, StorageError
from qload.errors.checkpoint import HubUnreachableError
from qload.hub.errors import need_library, refusals, unreadable
from qload.hub.ids import HubId
from qload.hub.listing import Listing, list_files
from qload.hub.ranges import HubFile, Traffic
from qload.storage import Place, RemoteFolder, locate, read_whole
from qload.storage.checkpoint_files import INDEX, MAX_INDEX, SUFFIX
from qload.storage.files import read_range

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

    listing: Listing
    traffic: Traffic


@contextmanager
def open_folder(model: HubId) -> Iterator[HubFolder]:
    """The model as a folder, for as long as the context lasts; what the cache has of it is read from there.

    StorageError where the hub refuses, HubUnreachableError where nobody answers, ArgumentError where
    huggingface_hub is not installed.
    """
    need_library(str(model))
    listing, traffic = list_files(model), Traffic()
    with TemporaryDirectory(prefix="qload-hub-") as directory:
        folder = Path(directory)
        places = {name: _place(listing, name, traffic) for name in listing.sizes if name.endswith(SUFFIX)}
        for name in listing.sizes:
            if name.endswith(SUFFIX) or "/" not in name:
                _put(folder / name, _json(listing, name, traffic))
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
        _check_room(model, needs)
        tell(f"fetching {needs} bytes of {model} into the cache, in {len(missing)} files")
        wanted = [*missing, *(name for name in listing.sizes if _is_json(name))]
        with refusals(str(model), model.wanted):
            place = snapshot_download(
                model.repo, revision=model.wanted, allow_patterns=[glob.escape(name) for name in wanted]
            )
        if Path(place).name != listing.commit:
            words = f"changed on the hub from commit {listing.commit} to {Path(place).name} meanwhile"
            raise unreadable(str(model), words, "run it again")
    places = {name: _fetched(listing, name) for name in needed}
    return replace(folder, places={**folder.places, **places})


def cached_folder(model: HubId, why: HubUnreachableError) -> RemoteFolder:
    """The snapshot that the cache has of a model, without a question to the hub; StorageError if it has none.

    `why`: the hub was not asked or did not answer, as the error then says.
    """
    from huggingface_hub import errors, snapshot_download

    remedy = f"{why.remedy}, or fetch the model where the hub is reached: hf download {model.repo}"
    try:
        with refusals(str(model), model.wanted):
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
        raise unreadable(str(model), words, remedy) from why
    try:
        locate(place)
    except StorageError as error:
        words = f"{why.detail}, and the local cache has only a part of it: {error.detail}"
        raise unreadable(str(model), words, remedy) from error
    return RemoteFolder(f"{model.repo}@{place.name}", place, {})


def _place(listing: Listing, name: str, traffic: Traffic) -> Place:
    """Where a tensor file is read."""
    return listing.cached(name) or _remote(listing, name, traffic)


def _remote(listing: Listing, name: str, traffic: Traffic) -> HubFile:
    return HubFile(listing.repo, listing.commit, name, listing.sizes[name], traffic)


def _fetched(listing: Listing, name: str) -> Path:
    place = listing.cached(name)
    if place is None:
        words = f"was fetched, and the cache does not have it in its length of {listing.sizes[name]} bytes"
        raise StorageError(name, "file-length", words, remedy="run it again")
    return place


def _is_json(name: str) -> bool:
    """Whether a file of the model's own folder is JSON that is read."""
    return name in CONFIGS or (name.endswith(INDEX) and "/" not in name)


def _json(listing: Listing, name: str, traffic: Traffic) -> bytes:
    """What is in a file if it is JSON that is read, from the cache or from the hub; else nothing."""
    if not _is_json(name):
        return b""
    size, limit = listing.sizes[name], MAX_INDEX if name.endswith(INDEX) else MAX_BYTES
    if size > limit:
        raise unreadable(name, f"{size} bytes long, larger than {limit}")
    place = listing.cached(name)
    if place is not None:
        return read_whole(place, name, limit, "unreadable")
    return read_range(_remote(listing, name, traffic), 0, size)


def _put(place: Path, content: bytes) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    except OSError as error:
        words = f"cannot be written to a folder here: {error.strerror or error}"
        raise unreadable(place.name, words) from error


def _check_room(model: HubId, needed: int) -> None:
    """ArgumentError where the cache's disk has fewer bytes left than are to be fetched."""
    from huggingface_hub.constants import HF_HUB_CACHE

    there = Path(HF_HUB_CACHE).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ArgumentError(HF_HUB_CACHE, f"{needed} bytes free, for the files of {model}", f"{free} bytes")
