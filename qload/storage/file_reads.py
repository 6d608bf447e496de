"""Positioned reads of files, by any number of threads: open files, whole tensors as byte ranges, and slices.

A file is opened at its first read and stays open until other files are read more. There is no memory map: a
file that is cut short during a mapped read would end the process, and one that is rewritten would mix both
versions.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qload.errors import StorageError
from qload.storage.files import FileIdentity, Place, RangeReader, open_regular, unreadable
from qload.storage.header import Entry

MAX_OPEN_FILES = 16  # open files without a reader; further files stay open during a read


class OpenFile:
    """An open file with a count of the threads that read it; closed with its last reference."""

    def __init__(self, descriptor: int, file: str) -> None:
        self.descriptor, self.file, self.users = descriptor, file, 0
        self._position = Lock()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; repeated calls do nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer with the bytes from a position; StorageError for a file that ends before."""
        need = len(buffer)
        try:
            positioned = hasattr(os, "preadv")
            while len(buffer):
                count = (
                    os.preadv(self.descriptor, [buffer], at) if positioned else self._read_part(buffer, at)
                )
                if not count:
                    break
                buffer, at = buffer[count:], at + count
        except OSError as error:
            raise unreadable(self.file, error) from error
        if len(buffer):
            raise StorageError(self.file, "file-length", f"ended before {need} bytes of a tensor were read")

    def _read_part(self, buffer: memoryview, at: int) -> int:
        """Read on a system without positioned reads, where all threads share one position."""
        with self._position:
            os.lseek(self.descriptor, at, os.SEEK_SET)
            with open(self.descriptor, "rb", buffering=0, closefd=False) as stream:
                return stream.readinto(buffer) or 0


class OpenFiles:
    """Pool of a checkpoint's open files, by name; each read checks that the file has not changed."""

    def __init__(self, files: Mapping[str, Place], identities: Mapping[str, FileIdentity]) -> None:
        self._files = {file: place for file, place in files.items() if isinstance(place, Path)}
        self._remote = {file: place for file, place in files.items() if not isinstance(place, Path)}
        self._identities = identities
        self._open: dict[str, OpenFile] = {}  # least recently used first
        self._lock, self._closed = Lock(), False

    def is_here(self, file: str) -> bool:
        """Return whether a file is local, and so has a descriptor when open."""
        return file in self._files

    @contextmanager
    def reading(self, file: str) -> Iterator[RangeReader]:
        """Open a file for reading; StorageError before or after the read for a changed file."""
        if file in self._remote:
            self._refuse_closed(file)
            yield self._remote[file]  # content at its address is constant
            return
        with self._lock:
            if self._closed:
                self._refuse_closed(file)
            opened = self._open.pop(file, None)
            if opened is None:
                opened = OpenFile(open_regular(self._files[file], file), file)
                self._compare(file, os.fstat(opened.descriptor))
            self._open[file] = opened
            opened.users += 1
        try:
            try:
                yield opened
            finally:
                self._check_unchanged(file)  # after the read, to notice writes during it
        finally:
            with self._lock:
                opened.users -= 1
                if self._closed or len(self._open) > MAX_OPEN_FILES:
                    self._close_idle(0 if self._closed else MAX_OPEN_FILES)

    def close(self) -> None:
        """Close all files; a file in use by a thread is closed at the end of its read."""
        with self._lock:
            self._closed = True
            self._close_idle(0)

    def _refuse_closed(self, file: str) -> None:
        if self._closed:
            raise StorageError(file, "closed", "read after its storage was closed")

    def _close_idle(self, keep: int) -> None:
        idle = [file for file, opened in self._open.items() if not opened.users]
        for file in idle[: max(0, len(self._open) - keep)]:
            self._open.pop(file).close()

    def _check_unchanged(self, file: str) -> None:
        try:
            stats = os.stat(self._files[file])
        except OSError as error:
            raise StorageError(file, "no-files", f"is gone: {error.strerror or error}") from error
        known = self._identities[file]
        if (stats.st_dev, stats.st_ino, stats.st_mtime_ns, stats.st_size) != (
            known.device,
            known.inode,
            known.modified_ns,
            known.size,
        ):
            self._compare(file, stats)

    def _compare(self, file: str, stats: os.stat_result) -> None:
        known, now = self._identities[file], FileIdentity.of(stats)
        if now.size != known.size:
            raise StorageError(file, "file-length", f"had {known.size} bytes when opened, now {now.size}")
        if now != known:
            raise StorageError(
                file,
                "file-replaced",
                "was written to, or replaced by another file, since it was opened",
                remedy="open the checkpoint again",
            )


GAP = 8 << 10  # bytes: reading a gap of this length costs less than another call
SCRATCH_BYTES = 1 << 20  # read in one call for several runs

Bounds = tuple[tuple[int, int], ...]


def read_slices(
    opened: RangeReader, entry: Entry, pairs: Bounds, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Read the bytes of a non-empty slice of a tensor, row major: uint8 of the slice's size in bytes.

    `pairs`: (start, stop) of each dimension. `out`: contiguous memory of that size, else allocated here.

        shape (8, 6), elements [2:5, 1:4]    ......    Each row of the slice is a run of 3 elements; runs
                                             .xxx..    begin 6 elements apart. A short gap between runs is
                                             .xxx..    read and dropped, for many runs in one call; over a
                                             .xxx..    long gap each run is read alone.
    """
    size = entry.itemsize
    extents = [stop - start for start, stop in pairs]
    run = np.empty(prod(extents) * size, np.uint8) if out is None else out
    first = contiguous_offset(entry, pairs)
    if first is not None:
        opened.read_into(run.data, first)
        return run
    axis = last_sliced_axis(entry, pairs)
    length = prod(extents[axis:]) * size  # of a run: the last sliced dimension and all after it
    strides = [prod(entry.shape[at + 1 :]) * size for at in range(len(pairs))]
    first = entry.begin + sum(start * stride for (start, _), stride in zip(pairs, strides, strict=True))
    outer, rows = extents[: axis - 1], extents[axis - 1]
    blocks = run.reshape(prod(outer), rows, length)
    for block, indices in zip(blocks, product(*map(range, outer)), strict=True):
        at = first + sum(index * stride for index, stride in zip(indices, strides, strict=False))
        _read_strided(opened, at, strides[axis - 1], block)
    return run


def last_sliced_axis(entry: Entry, pairs: Bounds) -> int:
    """Last dimension with a partial slice; 0 without one."""
    last = 0
    for axis, (start, stop) in enumerate(pairs):
        if stop - start != entry.shape[axis]:
            last = axis
    return last


def contiguous_offset(entry: Entry, pairs: Bounds) -> int | None:
    """File offset of a contiguous slice; None for a slice with gaps."""
    if last_sliced_axis(entry, pairs):
        return None
    row = prod(entry.shape[1:]) * entry.itemsize
    return entry.begin + (pairs[0][0] * row if pairs else 0)


def run_places(entry: Entry, pairs: Bounds) -> tuple[int, int, int] | None:
    """Place of the runs of a non-empty slice: file offset of the first one, number, and distance in bytes.

    None for unequal distances.
    """
    strides = [prod(entry.shape[axis + 1 :]) * entry.itemsize for axis in range(len(pairs))]
    first = entry.begin + sum(start * stride for (start, _), stride in zip(pairs, strides, strict=True))
    number, distance = 1, 0
    for axis in reversed(range(last_sliced_axis(entry, pairs))):
        length = pairs[axis][1] - pairs[axis][0]
        if length > 1 and number > 1 and strides[axis] != number * distance:
            return None
        if length > 1 and number == 1:
            distance = strides[axis]
        number *= length
    return first, number, distance


def _read_strided(opened: RangeReader, at: int, stride: int, block: NDArray[np.uint8]) -> None:
    """Fill (rows, length) with runs that begin `stride` bytes apart in the file."""
    rows, length = block.shape
    if stride - length > GAP:
        for row in block:
            opened.read_into(row.data, at)
            at += stride
        return
    step = min(rows, max(1, SCRATCH_BYTES // stride))
    scratch = np.empty((step, stride), np.uint8)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        span = (count - 1) * stride + length  # without the gap after the last run, which may exceed the file
        opened.read_into(scratch.reshape(-1)[:span].data, at + first * stride)
        block[first : first + count] = scratch[:count, :length]


class FileRange(NamedTuple):
    """Byte range of a file: name, offset, length."""

    file: str
    begin: int
    nbytes: int


class FileRuns(NamedTuple):
    """Byte ranges of equal length at equal distances in a file.

    Attributes
    ----------
    range
        File, offset of the first range, and bytes of all of them.
    number, distance
        Number of ranges, and bytes from the start of one to the start of the next.
    """

    range: FileRange
    number: int
    distance: int


@dataclass(frozen=True)
class FileRanges:
    """Byte ranges of tensors in a storage's files, for readers with descriptors.

    Such a reader passes its number of bytes to `count`.
    """

    entries: Mapping[str, Entry]
    holders: Mapping[str, str]  # tensor name -> file
    files: OpenFiles
    count: Callable[[int], None]

    def of(self, name: str, pairs: Bounds) -> FileRange | None:
        """Byte range of a contiguous slice of a tensor in a local file; None for any other slice or file.

        `pairs`: (start, stop) of each dimension, within the tensor's shape.
        """
        entry, file = self.entries[name], self.holders[name]
        begin = contiguous_offset(entry, pairs) if self.files.is_here(file) else None
        if begin is None:
            return None
        return FileRange(file, begin, prod(stop - start for start, stop in pairs) * entry.itemsize)

    def of_runs(self, name: str, pairs: Bounds) -> FileRuns | None:
        """Byte ranges of a non-empty slice of a tensor in a local file; None for unequal distances."""
        entry, file = self.entries[name], self.holders[name]
        places = run_places(entry, pairs) if self.files.is_here(file) else None
        if places is None:
            return None
        begin, number, distance = places
        nbytes = prod(stop - start for start, stop in pairs) * entry.itemsize
        return FileRuns(FileRange(file, begin, nbytes), number, distance)

    def of_rows(self, names: Sequence[str], pairs: Bounds) -> list[FileRange] | None:
        """Byte ranges of the same contiguous slice of tensors of one dtype and shape; None for any other."""
        place, entries = self.of(names[0], pairs), [self.entries.get(name) for name in names]
        first, ranges = self.entries[names[0]], list[FileRange]()
        if place is None:
            return None
        for name, entry in zip(names, entries, strict=True):
            if entry is None or (entry.dtype, entry.shape) != (first.dtype, first.shape):
                return None
            begin = place.begin - first.begin + entry.begin
            ranges.append(FileRange(self.holders[name], begin, place.nbytes))
        return ranges if all(map(self.files.is_here, {each.file for each in ranges})) else None

    @contextmanager
    def descriptor(self, file: str) -> Iterator[int]:
        """Open a local file for positioned reads by descriptor.

        StorageError, before or after the read, for a changed file and for a closed storage.
        """
        with self.files.reading(file) as opened:
            assert isinstance(opened, OpenFile)
            yield opened.descriptor
