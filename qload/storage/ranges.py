"""Tensors of files as ranges of bytes, for who reads files by their descriptors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from qload.storage.header import Entry
from qload.storage.open_files import OpenFile, OpenFiles
from qload.storage.rectangles import Bounds, in_one_run


class FileRange(NamedTuple):
    """Bytes of a file: its name, where they begin, how many they are."""

    file: str
    begin: int
    nbytes: int


@dataclass(frozen=True)
class FileRanges:
    """What a storage knows of its files. Who reads tells `count` how many bytes."""

    entries: Mapping[str, Entry]
    holders: Mapping[str, str]  # name of a tensor -> file
    files: OpenFiles
    count: Callable[[int], None]

    def of(self, name: str, pairs: Bounds) -> FileRange | None:
        """Where elements of a stored tensor lie, row major; None where that is no one range of a file here.

        `pairs`: (start, stop) of every dimension, within the tensor's shape.
        """
        entry, file = self.entries[name], self.holders[name]
        begin = in_one_run(entry, pairs) if self.files.is_here(file) else None
        if begin is None:
            return None
        return FileRange(file, begin, prod(stop - start for start, stop in pairs) * entry.itemsize)

    @contextmanager
    def descriptor(self, file: str) -> Iterator[int]:
        """What to read a file here by, at positions.

        StorageError, before or after, where the file is not what it was, or where the storage is closed.
        """
        with self.files.reading(file) as opened:
            assert isinstance(opened, OpenFile)
            yield opened.descriptor
