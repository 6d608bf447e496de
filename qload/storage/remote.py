"""Tensor files that are elsewhere: their headers and single ranges of them are read, never all of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Protocol


class RangeReader(Protocol):
    """What fills a buffer from a position of a file on, from any number of threads."""

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer of bytes from a position on; StorageError where that cannot be done whole."""


class RemoteFile(RangeReader, Protocol):
    """A file at an address under which there is never another one."""

    @property
    def size(self) -> int:
        """Its length in bytes, as the server says it; each read is checked against it."""


Place = Path | RemoteFile  # where a tensor file is read


@dataclass(frozen=True)
class RemoteFolder(PathLike[str]):
    """A checkpoint whose tensor files are elsewhere. It goes where a path goes, and reads nothing by itself.

    Attributes
    ----------
    name
        What messages and reports call it.
    folder
        A local directory that has its JSON, and a stand-in without content for each other file.
    places
        Where the files are read whose stand-ins those are, by their names in the folder.
    """

    name: str
    folder: Path
    places: Mapping[str, Place]

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return self.name

    def real(self, files: Mapping[str, Place]) -> dict[str, Place]:
        """The places in lieu of stand-ins."""
        return {name: self.places.get(name, place) for name, place in files.items()}


def read_range(reader: RangeReader, at: int, count: int) -> bytes:
    """`count` bytes from a position on."""
    buffer = bytearray(count)
    reader.read_into(memoryview(buffer), at)
    return bytes(buffer)
