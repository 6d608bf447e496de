"""`SafetensorsStorage`: storage of tensors in safetensors files, with validated headers and sliced reads."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from threading import Lock
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from qload.dtypes import TORCH
from qload.errors import ArgumentError, StorageError, check_type, checked
from qload.lazy_torch import Tensor, torch
from qload.storage.checkpoint_files import CheckpointFiles, PathLikes, check_index, folder_notes, locate
from qload.storage.file_reads import Bounds, FileRanges, OpenFiles, contiguous_offset, read_slices
from qload.storage.files import Place
from qload.storage.header import Entry, Header, read_headers
from qload.storage.protocol import (
    DTYPES,
    WORDS,
    AskedBytes,
    AskedRows,
    TensorInfo,
    bounds,
    check_memory,
    check_name,
    check_out,
    check_rows,
    missing,
    numpy_dtype,
)

log: logging.Logger = logging.getLogger("qload")

SLICE = frozenset({slice})


class SafetensorsStorage:
    """Storage of a checkpoint: one file, several files, a directory, or a sharded index.

    A file is opened at the first read of one of its tensors; a few files stay open. Truncation, writes and
    replacement of a file while the storage is open are errors. Nothing in a file is ever executed.

    Parameters
    ----------
    path
        A file, a directory, an index, or a sequence of files. StorageError for a missing file and for an
        invalid header: all headers are validated first.
    headers
        Headers of the files, if they have been read and checked before.

    Attributes
    ----------
    metadata
        Free-text metadata in the header of each file.

    Examples
    --------
    >>> import os, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> from qload import SafetensorsStorage
    >>> folder = tempfile.TemporaryDirectory()
    >>> save_file({"up.weight": torch.arange(8).reshape(4, 2)}, os.path.join(folder.name, "a.safetensors"))
    >>> with SafetensorsStorage(folder.name) as storage:
    ...     list(storage.keys()), storage.read("up.weight", (slice(0, 1),))
    (['up.weight'], tensor([[0, 1]]))
    >>> folder.cleanup()
    """

    def __init__(
        self, path: PathLikes | CheckpointFiles, *, headers: Mapping[str, Header] | None = None
    ) -> None:
        if path.__class__ is not CheckpointFiles:
            check_type("path", path, PathLikes | CheckpointFiles)
            check_type("headers", headers, Mapping[str, Header] | None)
        if sys.byteorder != "little":
            words = "safetensors are little-endian, and this machine is not"
            raise StorageError(str(path), "byte-order", words)
        located = path if isinstance(path, CheckpointFiles) else locate(path)
        self.files: dict[str, Place] = dict(located.files)
        if headers is None:
            headers = validate_headers(located, _raise, partial(log.info, "%s"))
        self._entries: dict[str, Entry] = {}
        self._infos: dict[tuple[str, tuple[int, ...], str], TensorInfo] = {}  # one for all equal tensors
        self._holders: dict[str, str] = {}  # tensor name -> file; a pair per tensor would take more memory
        for file, header in headers.items():
            self._entries.update(header.tensors)
            self._holders.update(dict.fromkeys(header.tensors, file))
        self.metadata: Mapping[str, Mapping[str, str]] = {
            file: header.metadata for file, header in headers.items()
        }
        self._open = OpenFiles(self.files, {file: head.identity for file, head in headers.items()})
        self.bytes_read: int = 0
        self._counting = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keys(self) -> Collection[str]:
        """Names of all tensors."""
        return self._entries.keys()

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file of the tensor `name`, from the header."""
        entry = self._entries.get(name) if type(name) is str else None
        file, entry = self._find(name) if entry is None else (self._holders[name], entry)
        kind = entry.dtype, entry.shape, file
        info = self._infos.get(kind)
        if info is None:
            info = self._infos[kind] = TensorInfo(DTYPES[entry.dtype], entry.shape, file)
        return info

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Copy the elements `index` of the tensor `name` to the CPU, and read no others.

        A whole tensor is one positioned read; `read_slices` reads a part. StorageError for a missing or
        changed file, and for a closed storage.
        """
        if index.__class__ is not tuple or not SLICE.issuperset(map(type, index)):
            check_type("index", index, tuple[slice, ...])
        file, entry = self._find(name)
        if not index and entry.end > entry.begin:
            whole = np.empty(entry.end - entry.begin, np.uint8)
            with self._open.reading(file) as opened:
                opened.read_into(whole.data, entry.begin)
            self._count(whole.nbytes)
            return torch.from_numpy(whole).view(TORCH[DTYPES[entry.dtype]]).reshape(entry.shape)
        pairs = bounds(name, entry.shape, index)
        extents = [stop - start for start, stop in pairs]
        if 0 in extents:
            return torch.empty(extents, dtype=TORCH[DTYPES[entry.dtype]])
        with self._open.reading(file) as opened:
            piece = read_slices(opened, entry, pairs)
        self._count(piece.nbytes)
        return torch.from_numpy(piece).view(TORCH[DTYPES[entry.dtype]]).reshape(extents)

    def read_array(self, name: str, index: tuple[slice, ...] = ()) -> NDArray[Any]:
        """Copy the elements `index` of the tensor `name` like `read`, as an array.

        Floats that numpy has no dtype for are their bits, as unsigned integers.
        """
        file, entry = self._find(name)
        pairs = bounds(name, entry.shape, index)
        extents = [stop - start for start, stop in pairs]
        dtype = numpy_dtype(DTYPES[entry.dtype])
        if 0 in extents:
            return np.empty(extents, dtype)
        with self._open.reading(file) as opened:
            piece = read_slices(opened, entry, pairs)
        self._count(piece.nbytes)
        return piece.view(dtype).reshape(extents)

    @checked
    def read_into(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        """Read the elements `index` of the tensor `name` into `out`, of their shape and dtype.

        ArgumentError for another `out`; StorageError as of `read`.
        """
        file, entry = self._find(name)
        pairs = bounds(name, entry.shape, index)
        check_out(name, out, [stop - start for start, stop in pairs], TORCH[DTYPES[entry.dtype]])
        if out.numel():
            with self._open.reading(file) as opened:
                read_slices(opened, entry, pairs, out.reshape(-1).view(torch.uint8).numpy())
            self._count(out.nbytes)

    @checked
    def read_bytes_into(self, asked: Sequence[AskedBytes]) -> None:
        """Read the bytes of each (name, index, memory) in `asked`, row major, into its memory.

        Each file is checked once. ArgumentError for memory of another size; StorageError as of `read`.
        """
        by_file: dict[str, list[tuple[Entry, Bounds, NDArray[np.uint8]]]] = {}
        for name, index, memory in asked:
            file, entry = self._find(name)
            pairs = bounds(name, entry.shape, index)
            check_memory(name, memory, prod(stop - start for start, stop in pairs) * entry.itemsize)
            if memory.size:
                by_file.setdefault(file, []).append((entry, pairs, memory))
        for file, pieces in by_file.items():
            with self._open.reading(file) as opened:
                for entry, pairs, memory in pieces:
                    read_slices(opened, entry, pairs, memory)
            self._count(sum(memory.nbytes for _, _, memory in pieces))

    def read_rows(self, asked: Sequence[AskedRows]) -> None:
        """Read the same elements of several tensors, each into a row; each file is checked once.

        `asked`: (names, index, out) each: tensors of one shape and dtype, slices, and (len(names), ...) on
        the CPU, in any strides. ArgumentError for another `out`, and for tensors of several shapes or dtypes;
        StorageError as of `read`.
        """
        entries, by_file = self._entries, dict[str, list[tuple[Entry, Bounds, int | None, NDArray[Any]]]]()
        for names, index, out in asked:
            first = entries[names[0]] if names[0] in entries else self._find(names[0])[1]
            pairs = bounds(names[0], first.shape, index)
            shape = [len(names)]
            for start, stop in pairs:
                shape.append(stop - start)
            check_rows(names[0], out, shape, TORCH[DTYPES[first.dtype]])
            whole = tuple(shape[1:]) == first.shape
            offset = first.begin if whole else contiguous_offset(first, pairs) if out.numel() else None
            words = out.view(TORCH[WORDS[out.itemsize]]).numpy()
            for at, name in enumerate(names):
                entry = entries[name] if name in entries else self._find(name)[1]
                if entry.dtype != first.dtype or entry.shape != first.shape:
                    expected = f"tensors of one dtype and shape: {first.dtype} {first.shape}, as {names[0]}"
                    raise ArgumentError("asked", expected, f"{entry.dtype} {entry.shape} of {name}")
                begin = None if offset is None else entry.begin + offset - first.begin
                if out.numel():
                    row = words[at : at + 1]
                    by_file.setdefault(self._holders[name], []).append((entry, pairs, begin, row))
        for file, rows in by_file.items():
            nbytes = 0
            with self._open.reading(file) as opened:
                for entry, pairs, begin, row in rows:
                    target = row if row.flags.c_contiguous else np.empty(row.shape, row.dtype)
                    memory = target.reshape(-1).view(np.uint8)
                    if begin is None:
                        read_slices(opened, entry, pairs, memory)
                    else:
                        opened.read_into(memory.data, begin)
                    if target is not row:
                        row[:] = target
                    nbytes += row.nbytes
            self._count(nbytes)

    @property
    def ranges(self) -> FileRanges:
        """Byte ranges of tensors in files, for readers with descriptors."""
        return FileRanges(self._entries, self._holders, self._open, self._count)

    def close(self) -> None:
        """Close all files; a read afterwards is a StorageError."""
        self._open.close()

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.bytes_read += nbytes

    def _find(self, name: str) -> tuple[str, Entry]:
        if type(name) is not str:
            check_name(name)
        if name not in self._entries:
            raise missing(name, self._entries.keys())
        return self._holders[name], self._entries[name]


def validate_headers(
    located: CheckpointFiles, refuse: Callable[[StorageError], None], note: Callable[[str], None]
) -> dict[str, Header]:
    """Read the headers of all files, and check them against each other and the index.

    Each error is passed to `refuse`, which may raise it, and each remark to `note`.
    """
    if located.is_gguf:
        file = next(iter(located.files))
        words = "is a GGUF file: open_checkpoint or GGUFStorage reads it"
        refuse(StorageError(file, "unsupported-format", words, remedy="name a safetensors file"))
        return {}
    found = read_headers(located.files)
    headers = {file: header for file, header in found.items() if not isinstance(header, StorageError)}
    errors = [header for header in found.values() if isinstance(header, StorageError)]
    errors = errors or list(check_index(located, headers))
    for error in errors:
        refuse(error)
    for text in () if errors else folder_notes(located, headers):
        note(text)
    return headers


def _raise(error: StorageError) -> None:
    raise error
