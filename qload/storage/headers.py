"""The headers of many files, read by several threads: a file that is far away is waited for, not computed."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from qload.errors import StorageError
from qload.storage.header import Header, read_header
from qload.storage.remote import Place

READERS = 8  # each holds one header, of up to MAX_HEADER bytes


def read_headers(files: Mapping[str, Place]) -> dict[str, Header | StorageError]:
    """The header of each file, or why there is none, in the order of the files."""
    if len(files) < 2:
        return {file: _read(file, place) for file, place in files.items()}
    with ThreadPoolExecutor(min(READERS, len(files)), "qload-headers") as readers:
        return dict(zip(files, readers.map(_read, files, files.values()), strict=True))


def _read(file: str, place: Place) -> Header | StorageError:
    try:
        return read_header(place, file)
    except StorageError as error:
        return error
