"""Tensors in safetensors files: headers validated first, then only the bytes asked for."""

import mmap
import sys
from collections.abc import Collection
from io import BufferedReader
from math import prod
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qload.errors import StorageError, checked
from qload.storage.header import Entry, read_header
from qload.storage.locate import PathLikes, check_index, locate
from qload.storage.protocol import TensorInfo, bounds, check_name, missing


class SafetensorsStorage:
    """A checkpoint of one file, several, a directory, or a sharded index.

    Files are mapped read-only when a tensor of theirs is first read: a private, writable map of a
    large file counts as memory and fails. Nothing in a file is ever executed.
    """

    @checked
    def __init__(self, path: PathLikes) -> None:
        if sys.byteorder != "little":
            raise StorageError(
                str(path), "byte-order", "safetensors are little-endian, and this machine is not"
            )
        located = locate(path)
        self.files: dict[str, Path] = dict(located.files)
        headers = {file: read_header(place, file) for file, place in self.files.items()}
        for error in check_index(located, headers):
            raise error
        self._sizes = {file: header.file_size for file, header in headers.items()}
        self._entries = {
            name: (file, e) for file, head in headers.items() for name, e in head.tensors.items()
        }
        self._maps: dict[str, mmap.mmap] = {}
        self._lock, self._closed = Lock(), False
        self.bytes_read: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keys(self) -> Collection[str]:
        """The names of all tensors."""
        return self._entries.keys()

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file, from the header."""
        file, entry = self._find(name)
        return TensorInfo(entry.dtype, entry.shape, file)

    @checked
    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """A copy, on the CPU, of exactly those elements."""
        file, entry = self._find(name)
        pairs = bounds(name, entry.shape, index)
        extents = [stop - start for start, stop in pairs]
        if 0 in extents:
            return torch.empty(extents, dtype=entry.dtype)
        if all(pair == (0, size) for pair, size in zip(pairs[1:], entry.shape[1:], strict=True)):
            piece = self._run(file, entry, pairs[0] if pairs else (0, 1))
        else:
            piece = _rectangle(self._map(file), entry, pairs)
        self.bytes_read += piece.nbytes
        return torch.from_numpy(piece).view(entry.dtype).reshape(extents)

    def close(self) -> None:
        """Unmap all files; reading afterwards is a StorageError."""
        with self._lock:
            self._closed = True
            for mapped in self._maps.values():
                mapped.close()
            self._maps.clear()

    def _find(self, name: str) -> tuple[str, Entry]:
        if type(name) is not str:
            check_name(name)
        if name not in self._entries:
            raise missing(name, self._entries.keys())
        return self._entries[name]

    def _run(self, file: str, entry: Entry, rows: tuple[int, int]) -> NDArray[np.uint8]:
        """Bytes that lie one after another: read, as a fault in a map makes the system read far ahead."""
        row = prod(entry.shape[1:]) * entry.dtype.itemsize
        run = np.empty((rows[1] - rows[0]) * row, np.uint8)
        with self._open(file) as stream:
            stream.seek(entry.begin + rows[0] * row)
            if stream.readinto(run.data) != run.nbytes:
                raise StorageError(
                    file, "file-length", f"ended before {run.nbytes} bytes of a tensor were read"
                )
        return run

    def _map(self, file: str) -> mmap.mmap:
        with self._lock, self._open(file) as stream:
            if file not in self._maps:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            return self._maps[file]

    def _open(self, file: str) -> BufferedReader:
        """The file, if it still has the length that its header was checked against."""
        if self._closed:
            raise StorageError(file, "closed", "read after its storage was closed")
        try:
            stream = self.files[file].open("rb")
        except OSError as error:
            raise StorageError(file, "no-files", f"is gone: {error.strerror or error}") from error
        size = stream.seek(0, 2)
        if size != self._sizes[file]:
            stream.close()
            raise StorageError(file, "file-length", f"had {self._sizes[file]} bytes when opened, now {size}")
        return stream


def _rectangle(mapped: mmap.mmap, entry: Entry, pairs: tuple[tuple[int, int], ...]) -> NDArray[np.uint8]:
    """The bytes of a rectangle, row major, its last dimension counted in bytes."""
    size = entry.dtype.itemsize
    *outer, last = entry.shape
    *rows, (start, stop) = pairs
    flat = np.frombuffer(mapped, np.uint8, prod(outer) * last * size, entry.begin)
    inner = slice(start * size, stop * size)
    return flat.reshape(*outer, last * size)[(*(slice(*pair) for pair in rows), inner)].copy()
