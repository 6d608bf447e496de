"""Header of a safetensors file, checked before any data is read.

A file is 8 bytes with the header's length (little-endian), the header (JSON, `{` first, spaces after),
and the data. The header maps each name to dtype, shape and `data_offsets`, which count from the end of
the header; the tensors tile the data, without overlap or hole, to the end of the file.
Source: the format section of the safetensors README.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from qload.errors import StorageError
from qload.storage.files import (
    NO_FILE,
    FileIdentity,
    Place,
    RemoteFile,
    load_json,
    open_regular,
    read_first,
    read_range,
    shortened,
)
from qload.storage.unsupported_files import kind_of_head

Shape = tuple[int, ...]

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the format
MAX_RANK = 25  # dimensions that torch can index on every device
MAX_NAME_LENGTH = 1024  # letters
MAX_EMPTY_SIDE = 1 << 24  # dimension of a tensor without elements, which no file length bounds
# Dtype in a header -> bytes of an element; other dtypes are not supported.
ITEM_BYTES = {
    **dict.fromkeys(("F64", "C64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Header entry of a tensor: dtype name, shape, and byte range [begin, end) in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Header:
    """Header of a file: tensors by name, free-text metadata, length and identity of the file."""

    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    file_size: int
    identity: FileIdentity = NO_FILE


def read_header(path: Place, file: str) -> Header:
    """Read and check the header of a file, without its data; StorageError with the violated rule."""
    if not isinstance(path, Path):
        return _read_remote(path, file)
    descriptor = open_regular(path, file)
    try:
        stats = os.fstat(descriptor)
        head = read_first(descriptor, LENGTH_BYTES, file)
        length = int.from_bytes(head, "little")
        if len(head) == LENGTH_BYTES and length <= min(MAX_HEADER_BYTES, stats.st_size - LENGTH_BYTES):
            head += read_first(descriptor, length, file)
    finally:
        os.close(descriptor)
    return replace(parse_header(head, stats.st_size, file), identity=FileIdentity.of(stats))


def _read_remote(remote: RemoteFile, file: str) -> Header:
    head = read_range(remote, 0, min(LENGTH_BYTES, remote.size))
    length = int.from_bytes(head, "little")
    if len(head) == LENGTH_BYTES and length <= min(MAX_HEADER_BYTES, remote.size - LENGTH_BYTES):
        head += read_range(remote, LENGTH_BYTES, length)
    return parse_header(head, remote.size, file)


def parse_header(head: bytes, file_size: int, file: str) -> Header:
    """Parse and check the header in the first bytes of a file of `file_size` bytes."""
    if len(head) < LENGTH_BYTES:
        raise StorageError(file, "header-length", f"{file_size} bytes long, too short for a header")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES or length > file_size - LENGTH_BYTES or len(head) < LENGTH_BYTES + length:
        if file_kind := kind_of_head(head):
            raise StorageError(
                file, file_kind.rule, f"is {file_kind.words}, despite its name", remedy=file_kind.remedy
            )
        raise StorageError(
            file,
            "header-length",
            f"says its header has {length} bytes; the file has {file_size}, the format allows "
            f"{MAX_HEADER_BYTES}",
        )
    text = head[LENGTH_BYTES : LENGTH_BYTES + length]
    if text[:1] != b"{":
        raise StorageError(file, "header-json", f"the header begins with {text[:1]!r}, not with '{{'")
    entries = load_json(text, file, "header-json")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise StorageError(file, "header-entry", "__metadata__ has to map text to text")
    start = LENGTH_BYTES + length
    shapes: dict[Shape, Shape] = {}  # equal shapes are one object; a model has few
    tensors = {name: _parse_entry(name, entry, start, file, shapes) for name, entry in entries.items()}
    _check_tiling(tensors, start, file_size, file)
    return Header(tensors, metadata, file_size)


def _parse_entry(name: str, entry: Any, start: int, file: str, shapes: dict[Shape, Shape]) -> Entry:
    if len(name) > MAX_NAME_LENGTH or not all(name.split(".")):
        raise StorageError(
            file,
            "header-entry",
            f"is not a tensor name: words between dots, at most {MAX_NAME_LENGTH} letters",
            shortened(name) or '""',
        )
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise StorageError(
            file, "header-entry", "needs dtype, shape and data_offsets, and nothing else", name
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise StorageError(file, "dtype", f"has an unsupported dtype: {dtype!r:.40}", name)
    if not _is_list_of_naturals(shape) or len(shape) > MAX_RANK:
        words = f"shape {shape!r:.80} is not a list of at most {MAX_RANK} non-negative integers"
        raise StorageError(file, "header-entry", words, name)
    if 0 in shape and max(shape) > MAX_EMPTY_SIDE:
        words = f"has no elements and a dimension of {max(shape)}: {shape!r:.80}"
        raise StorageError(file, "header-entry", words, name)
    if not _is_list_of_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        words = f"data_offsets {offsets!r:.80} are not the begin and the end of a range"
        raise StorageError(file, "header-entry", words, name)
    need = prod(shape) * ITEM_BYTES[dtype]
    if need != offsets[1] - offsets[0]:
        raise StorageError(
            file,
            "offset-span",
            f"shape {shape} of {dtype} takes {need} bytes, data_offsets span {offsets[1] - offsets[0]}",
            name,
        )
    sizes = tuple(shape)
    return Entry(dtype, shapes.setdefault(sizes, sizes), start + offsets[0], start + offsets[1])


def _is_list_of_naturals(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for part in value:  # noqa: SIM110  (a generator takes three times as long)
        if type(part) is not int or not 0 <= part < 1 << 62:
            return False
    return True


def _check_tiling(tensors: Mapping[str, Entry], start: int, file_size: int, file: str) -> None:
    at = start
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            rule, word = (
                ("offset-overlap", "overlaps the tensor before it by")
                if entry.begin < at
                else ("offset-gap", "leaves a hole before it of")
            )
            raise StorageError(file, rule, f"{word} {abs(entry.begin - at)} bytes", name)
        at = entry.end
    if at != file_size:
        defect = "truncated" if at > file_size else "too long"
        raise StorageError(
            file,
            "file-length",
            f"{defect}: its header accounts for {at} bytes, the file has {file_size}",
            remedy="fetch the file again",
        )


MAX_READER_THREADS = 8  # each has up to MAX_HEADER_BYTES in memory


def read_headers(files: Mapping[str, Place]) -> dict[str, Header | StorageError]:
    """Read the headers of many files with several threads, as remote files have latency: header or error."""
    if len(files) < 2:
        return {file: _header_or_error(file, place) for file, place in files.items()}
    with ThreadPoolExecutor(min(MAX_READER_THREADS, len(files)), "qload-headers") as readers:
        return dict(zip(files, readers.map(_header_or_error, files, files.values()), strict=True))


def _header_or_error(file: str, place: Place) -> Header | StorageError:
    try:
        return read_header(place, file)
    except StorageError as error:
        return error
