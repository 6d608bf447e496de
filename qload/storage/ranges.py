"""Tensors as ranges of files, for who reads by descriptors."""

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

from qload.storage.rectangles import Bounds


class FileRange(NamedTuple):
    """Bytes of a file: its name, where they begin, how many they are."""

    file: str
    begin: int
    nbytes: int


@runtime_checkable
class RangedStorage(Protocol):
    """A storage some of whose tensors lie in files here, as `SafetensorsStorage`."""

    def range_of(self, name: str, pairs: Bounds) -> FileRange | None:
        """Where the elements of `name` within `pairs` lie, row major; None where that is no one range."""

    def descriptor(self, file: str, nbytes: int) -> AbstractContextManager[int]:
        """What to read `nbytes` of a file by; StorageError, before or after, where it is not what it was."""
