"""Header of a GGUF file, checked before any data is read.

    "GGUF"  u32 version  u64 tensors  u64 keys
    keys     u64 length and text, u32 type, value     an array: u32 type, u64 count, items
    tensors  u64 length and name, u32 rank, u64 dims[rank], u32 type, u64 offset
    padding to a multiple of `general.alignment`, data

All numbers are little-endian. Dimensions are innermost first, and offsets count from the start of the data.
Tensors follow each other in the data, each padded to the alignment. The header has no length field, so that
it is read in pieces up to a limit. Long arrays, such as the tokens of a vocabulary, are counted and skipped.
Source: docs/gguf.md of ggml, gguf 0.19.0, and gguf.cpp of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from qload.errors import StorageError
from qload.storage.files import NO_FILE, FileIdentity, Place, open_regular, read_range, shortened, unreadable
from qload.storage.gguf_types import GGMLType, ggml_type
from qload.storage.header import MAX_HEADER_BYTES, MAX_NAME_LENGTH

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_RANK = 4  # dimensions of ggml
MAX_KEYS, MAX_TENSORS = 1 << 16, 1 << 20
MAX_ITEMS = 1 << 21  # items that are walked one by one: strings, and values of nested arrays
MAX_KEPT_ITEMS = 1 << 12  # of an array: one value a layer
MAX_DEPTH = 4  # nested arrays
MAX_KEY_BYTES = 1 << 16
MAX_ALIGNMENT = 1 << 20
CHUNK_BYTES = 1 << 16
STRING, ARRAY = 8, 9
SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
U32, U64 = SCALARS[4], SCALARS[10]


@dataclass(frozen=True, slots=True)
class GGUFEntry:
    """Header entry of a tensor: type, shape (outermost first), and byte range [begin, end) in the file."""

    type: GGMLType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class ArrayLength:
    """Length of an array, without its values."""

    count: int


@dataclass(frozen=True)
class GGUFHeader:
    """Header of a file: tensors by name, values by key, length and identity of the file.

    A long array, and an array of texts, is an `ArrayLength`.
    """

    tensors: Mapping[str, GGUFEntry]
    keys: Mapping[str, Any]
    file_size: int
    identity: FileIdentity = NO_FILE


Fetch = Callable[[int, int], bytes]  # offset, bytes -> content


def read_gguf_header(path: Place, file: str) -> GGUFHeader:
    """Read and check the header of a GGUF file, without its data; StorageError with the violated rule."""
    if not isinstance(path, Path):
        return parse_gguf_header(partial(read_range, path), path.size, file)
    descriptor = open_regular(path, file)
    try:
        stats = os.fstat(descriptor)

        def fetch(at: int, count: int) -> bytes:
            try:
                os.lseek(descriptor, at, os.SEEK_SET)
                return os.read(descriptor, count)
            except OSError as error:
                raise unreadable(file, error) from error

        return parse_gguf_header(fetch, stats.st_size, file, FileIdentity.of(stats))
    finally:
        os.close(descriptor)


def parse_gguf_header(
    fetch: Fetch, file_size: int, file: str, identity: FileIdentity = NO_FILE
) -> GGUFHeader:
    """Parse and check the header of a file of `file_size` bytes, read by `fetch`."""
    reader = _HeaderReader(fetch, file_size, file)
    tensor_count, key_count = _read_preamble(reader)
    keys: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.text(MAX_KEY_BYTES)
        if key in keys:
            raise StorageError(file, "duplicate-key", "occurs twice in the header", shortened(key))
        keys[key] = reader.value(reader.number(U32), key)
    alignment = keys.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
        words = f"general.alignment is {alignment!r:.40}, not a multiple of 8 up to {MAX_ALIGNMENT}"
        raise StorageError(file, "header-entry", words)
    listed: dict[str, tuple[GGMLType, tuple[int, ...], int]] = {}
    for _ in range(tensor_count):
        name = reader.text(MAX_KEY_BYTES)
        if name in listed:
            raise StorageError(file, "duplicate-tensor", "occurs twice in the header", shortened(name))
        listed[name] = _read_tensor(reader, name)
    start = -(-reader.at // alignment) * alignment
    return GGUFHeader(_place_tensors(listed, start, alignment, file_size, file), keys, file_size, identity)


def _read_preamble(reader: _HeaderReader) -> tuple[int, int]:
    """Read magic, version and counts: (tensors, keys)."""
    file = reader.file
    if reader.take(4) != MAGIC:
        raise StorageError(file, "not-safetensors", "does not begin with the letters GGUF")
    version = reader.number(U32)
    if version & 0xFFFF == 0 and version:
        raise StorageError(
            file,
            "byte-order",
            "is a big-endian GGUF file, of a machine such as s390x; qload reads little-endian files",
            remedy="gguf_convert_endian.py of llama.cpp writes it as little-endian",
        )
    if version not in VERSIONS:
        words = f"is a GGUF file of version {version}; versions 2 and 3 are read"
        raise StorageError(file, "unsupported-format", words, remedy="convert the model again with llama.cpp")
    tensor_count, key_count = reader.number(U64), reader.number(U64)
    for words, count, limit in (("tensors", tensor_count, MAX_TENSORS), ("keys", key_count, MAX_KEYS)):
        if count > limit:
            raise StorageError(file, "header-length", f"says it has {count} {words}, more than {limit}")
    return tensor_count, key_count


def _read_tensor(reader: _HeaderReader, name: str) -> tuple[GGMLType, tuple[int, ...], int]:
    """Read type, shape and offset of a tensor."""
    file = reader.file
    if len(name) > MAX_NAME_LENGTH or not all(name.split(".")):
        words = f"is not a tensor name: words between dots, at most {MAX_NAME_LENGTH} letters"
        raise StorageError(file, "header-entry", words, shortened(name) or '""')
    rank = reader.number(U32)
    if not 1 <= rank <= MAX_RANK:
        raise StorageError(file, "header-entry", f"has {rank} dimensions, not 1 to {MAX_RANK}", name)
    shape = tuple(reader.number(U64) for _ in range(rank))[::-1]
    if 0 in shape or max(shape) >= 1 << 62:
        raise StorageError(file, "header-entry", f"has a shape without elements, or too large: {shape}", name)
    kind = ggml_type(reader.number(U32), file, name)
    if shape[-1] % kind.elements:
        words = f"has rows of {shape[-1]} elements, which blocks of {kind.elements} ({kind.name}) do not fill"
        raise StorageError(file, "offset-span", words, name)
    return kind, shape, reader.number(U64)


def _place_tensors(
    listed: Mapping[str, tuple[GGMLType, tuple[int, ...], int]],
    start: int,
    alignment: int,
    file_size: int,
    file: str,
) -> dict[str, GGUFEntry]:
    """Check that tensors follow each other in the data; entries in the order of the header."""
    end, placed = start, dict[str, GGUFEntry]()
    for name, (kind, shape, offset) in sorted(listed.items(), key=lambda item: item[1][2]):
        begin, expected = start + offset, -(-end // alignment) * alignment
        if begin != expected:
            overlaps = begin < end
            rule = "offset-overlap" if overlaps else "offset-gap"
            words = f"begins at {begin}; the tensor before it ends at {end}, the alignment is {alignment}"
            raise StorageError(file, rule, words, name)
        end = begin + prod(shape) // kind.elements * kind.nbytes
        placed[name] = GGUFEntry(kind, shape, begin, end)
    if listed and not end <= file_size < end + alignment:
        defect = "truncated" if end > file_size else "too long"
        raise StorageError(
            file,
            "file-length",
            f"{defect}: its header accounts for {end} bytes, the file has {file_size}",
            remedy="fetch the file again",
        )
    return {name: placed[name] for name in listed}


class _HeaderReader:
    """Sequential reads of a header within its limits; StorageError for a header beyond them."""

    def __init__(self, fetch: Fetch, file_size: int, file: str) -> None:
        self.file, self.at = file, 0
        self._fetch, self._file_size, self._limit = fetch, file_size, min(file_size, MAX_HEADER_BYTES)
        self._chunk, self._chunk_at = b"", 0
        self._items_left = MAX_ITEMS

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes."""
        begin = self.at - self._chunk_at
        if begin + count > len(self._chunk):
            self._check(count)
            wanted = min(max(count, CHUNK_BYTES), self._limit - self.at)
            self._chunk, self._chunk_at, begin = self._read(wanted), self.at, 0
        self.at += count
        return self._chunk[begin : begin + count]

    def number(self, kind: struct.Struct) -> Any:
        """Read a scalar."""
        return kind.unpack(self.take(kind.size))[0]

    def text(self, limit: int) -> str:
        """Read a length and a text of at most `limit` bytes."""
        length = self.number(U64)
        if length > limit:
            raise StorageError(self.file, "header-length", f"has a text of {length} bytes, more than {limit}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise StorageError(
                self.file, "header-entry", f"has a text that is not UTF-8: {error!s:.80}"
            ) from error

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        """Read the value of a key."""
        if kind == STRING:
            return self.text(MAX_HEADER_BYTES)
        if kind == ARRAY:
            return self._array(key, depth)
        if kind not in SCALARS:
            raise StorageError(
                self.file, "header-entry", f"has a value of unknown type {kind}", shortened(key)
            )
        return self.number(SCALARS[kind])

    def _array(self, key: str, depth: int) -> list[Any] | ArrayLength:
        """Read an array of a few numbers; count any other."""
        kind, count = self.number(U32), self.number(U64)
        if kind in SCALARS:
            if count <= MAX_KEPT_ITEMS:
                self._check(count * SCALARS[kind].size)
                return [self.number(SCALARS[kind]) for _ in range(count)]
            self._skip(count * SCALARS[kind].size)
            return ArrayLength(count)
        self._items_left -= count
        if self._items_left < 0 or depth >= MAX_DEPTH:
            words = f"has an array of {count} items at depth {depth}; at most {MAX_ITEMS} items are read"
            raise StorageError(self.file, "header-length", words, shortened(key))
        for _ in range(count):
            if kind == STRING:
                self._skip(self.number(U64))
            else:
                self.value(kind, key, depth + 1)
        return ArrayLength(count)

    def _skip(self, count: int) -> None:
        self._check(count)
        self.at += count

    def _check(self, count: int) -> None:
        if count > self._limit - self.at:
            words = (
                f"its header does not end within the {self._file_size} bytes of the file and the "
                f"{MAX_HEADER_BYTES} bytes that are read of a header"
            )
            raise StorageError(self.file, "header-length", words, remedy="fetch the file again")

    def _read(self, count: int) -> bytes:
        pieces: list[bytes] = []
        at = self.at
        while count:
            piece = self._fetch(at, count)
            if not piece:
                raise StorageError(self.file, "file-length", "ended before its header was read")
            pieces.append(piece)
            at, count = at + len(piece), count - len(piece)
        return b"".join(pieces)
