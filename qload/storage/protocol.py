"""`WeightStorage`: the interface of storages of named tensors, and checks that they share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from qload import dtypes
from qload.dtypes import STORED, TORCH, Dtype, DtypeLike
from qload.errors import ArgumentError, MissingTensorError
from qload.lazy_torch import Tensor, torch

MAX_COMPARED_NAMES = 1000  # names to compare with a missing name
DTYPES = {  # by name in a safetensors header
    "F64": dtypes.float64,
    "F32": dtypes.float32,
    "F16": dtypes.float16,
    "BF16": dtypes.bfloat16,
    "C64": dtypes.complex64,
    "I64": dtypes.int64,
    "I32": dtypes.int32,
    "I16": dtypes.int16,
    "I8": dtypes.int8,
    "U64": dtypes.uint64,
    "U32": dtypes.uint32,
    "U16": dtypes.uint16,
    "U8": dtypes.uint8,
    "BOOL": dtypes.bool_,
    "F8_E4M3": dtypes.float8_e4m3fn,
    "F8_E5M2": dtypes.float8_e5m2,
    "F8_E8M0": dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": dtypes.float8_e5m2fnuz,
}

WORDS = {
    1: dtypes.uint8,
    2: dtypes.int16,
    4: dtypes.int32,
    8: dtypes.int64,
}  # bytes of an element -> integers


@dataclass(frozen=True, slots=True, init=False)
class TensorInfo:
    """Header information of a tensor.

    Parameters
    ----------
    dtype
        Dtype of the tensor, as a `Dtype` or as torch's.

    Attributes
    ----------
    stored_dtype, shape
        Dtype and shape of the whole tensor.
    file
        Name of its file; None in memory.
    shared
        Whether another tensor has the same bytes, and counts them.
    nbytes
        Bytes of the whole tensor.
    """

    stored_dtype: Dtype
    shape: tuple[int, ...]
    file: str | None
    shared: bool
    nbytes: int = field(repr=False, compare=False)

    def __init__(
        self, dtype: DtypeLike, shape: tuple[int, ...], file: str | None = None, shared: bool = False
    ) -> None:
        stored_dtype = STORED[dtype]
        object.__setattr__(self, "stored_dtype", stored_dtype)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "file", file)
        object.__setattr__(self, "shared", shared)
        object.__setattr__(self, "nbytes", prod(shape) * stored_dtype.itemsize)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor in torch."""
        return TORCH[self.stored_dtype]


@runtime_checkable
class WeightStorage(Protocol):
    """Storage of named tensors with reads of slices.

    `keys` and `info` read no values, `read` returns copies on the CPU, and the tensors are constant while the
    storage is open. Implementations: `MemoryStorage`, `SafetensorsStorage`.
    """

    def keys(self) -> Collection[str]:
        """Names of all tensors."""

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file of the tensor `name`; MissingTensorError."""

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Copy the elements `index` of the tensor `name` to the CPU, and read no others.

        `index`: slices of step 1 within the shape, else ArgumentError; dimensions beyond the index are whole.
        """

    def close(self) -> None:
        """Close all files; a read afterwards is an error."""


@runtime_checkable
class FillingStorage(Protocol):
    """Storage that reads into memory of the caller, without a copy.

    Optional methods, as of `SafetensorsStorage`, read many slices in one call: `read_bytes_into(asked)`, and
    `read_rows(asked)` the same slices of tensors of one shape, such as the experts of a layer.
    """

    def read_into(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        """Read into `out` like `read`: a contiguous CPU tensor of the slice's shape and dtype."""


def numpy_dtype(dtype: Dtype) -> np.dtype[Any]:
    """Dtype of numpy; of floats that it does not have, unsigned integers of their size."""
    known = dtype.name in np.sctypeDict
    return np.dtype(dtype.name if known else f"uint{8 * dtype.itemsize}")


def read_array(storage: WeightStorage, name: str, index: tuple[slice, ...] = ()) -> NDArray[Any]:
    """Read the elements `index` of a tensor as an array, without torch if the storage can."""
    read: Callable[[str, tuple[slice, ...]], NDArray[Any]] | None = getattr(storage, "read_array", None)
    if read is not None:
        return read(name, index)
    values: NDArray[Any] = storage.read(name, index).numpy()
    return values


def metadata_of(storage: WeightStorage) -> Mapping[str, Mapping[str, str]]:
    """Free-text metadata in the header of each file; empty for a storage without files."""
    metadata: Mapping[str, Mapping[str, str]] = getattr(storage, "metadata", {})
    return metadata


AskedBytes = tuple[str, tuple[slice, ...], np.ndarray]  # name, index, and memory for the bytes
AskedRows = tuple[Sequence[str], tuple[slice, ...], Tensor]  # names of tensors, index, and a row for each


def check_out(name: str, out: Tensor, extents: Sequence[int], dtype: torch.dtype) -> None:
    """Raise ArgumentError unless `out` is contiguous, on the CPU, and of the slice's shape and dtype."""
    fits = (tuple(out.shape), out.dtype, out.device.type) == (tuple(extents), dtype, "cpu")
    if not (fits and out.is_contiguous()):
        expected = f"{dtype} {tuple(extents)} on the CPU, in one piece, for {name}"
        raise ArgumentError("out", expected, f"{out.dtype} {tuple(out.shape)} on {out.device}")


def check_rows(
    name: str, out: Tensor, shape: Sequence[int], dtype: torch.dtype, devices: Sequence[str] = ("cpu",)
) -> None:
    """Raise ArgumentError unless `out` is of this shape and dtype, on one of these types of devices."""
    if (tuple(out.shape), out.dtype) != (tuple(shape), dtype) or out.device.type not in devices:
        place = " or ".join(devices).replace("cpu", "the CPU").replace("cuda", "a GPU")
        expected = f"{dtype} {tuple(shape)} on {place}, for {name} and tensors like it"
        raise ArgumentError("out", expected, f"{out.dtype} {tuple(out.shape)} on {out.device}")


def extents(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Lengths of ranges."""
    return [stop - start for start, stop in pairs]


def check_name(name: object) -> None:
    """Raise ArgumentError for a name that is not text."""
    if not isinstance(name, str):
        raise ArgumentError("name", "the name of a tensor", type(name).__name__)


def check_memory(name: str, memory: NDArray[np.uint8], nbytes: int) -> None:
    """Raise ArgumentError unless memory is writable, contiguous, and `nbytes` bytes long."""
    fits = memory.dtype == np.uint8 and memory.shape == (nbytes,)
    if not (fits and memory.flags.c_contiguous and memory.flags.writeable):
        expected = f"a row of {nbytes} bytes that can be written, for {name}"
        raise ArgumentError("asked", expected, f"{memory.dtype} {memory.shape}")


def missing(name: str, keys: Collection[str]) -> MissingTensorError:
    """Build the error for a missing name, with similar names."""
    return MissingTensorError(name, (name,), get_close_matches(name, _candidates(name, keys)))


def _candidates(name: str, keys: Collection[str]) -> list[str]:
    """Names to compare with a missing name: of many, only names with as many dots and letters, for speed."""
    if len(name) > 200:
        return []
    if len(keys) <= MAX_COMPARED_NAMES:
        return list(keys)
    dots, length = name.count("."), len(name)
    similar = (key for key in keys if abs(len(key) - length) <= 2 and key.count(".") == dots)
    return list(islice(similar, MAX_COMPARED_NAMES))


def bounds(name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
    """(start, stop) of each dimension; ArgumentError for a step, and for bounds outside of the shape."""
    if len(index) > len(shape):
        raise ArgumentError("index", f"at most {len(shape)} slices for {name} of shape {shape}", repr(index))
    full = [slice(None)] * (len(shape) - len(index))
    pairs = []
    for piece, size in zip((*index, *full), shape, strict=True):
        start = 0 if piece.start is None else piece.start
        stop = size if piece.stop is None else piece.stop
        if piece.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise ArgumentError("index", f"slices within shape {shape} of {name}, of step 1", repr(index))
        pairs.append((start, stop))
    return tuple(pairs)


def read_rows(storage: WeightStorage, asked: Sequence[AskedRows]) -> None:
    """Read the same elements of several tensors, each into a row: (names, index, out) each."""
    rows: Callable[[Sequence[AskedRows]], None] | None = getattr(storage, "read_rows", None)
    if rows is not None:
        rows(asked)
        return
    for names, index, out in asked:
        for name, row in zip(names, out, strict=True):
            row.copy_(storage.read(name, index))


RUN_ELEMENTS = 1 << 16  # elements per run of rows: small, as a caller may stop after the first


def rows(storage: WeightStorage, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, rows) for all runs of whole rows (first dimension) of a tensor, in little memory."""
    if not storage.info(name).shape:
        yield 0, storage.read(name).reshape(1)
        return
    for run in row_runs(storage.info(name)):
        yield run.start, storage.read(name, (run,))


def row_runs(info: TensorInfo) -> Iterator[slice]:
    """Yield runs of whole rows (first dimension) of a tensor, of little memory."""
    width = max(1, info.nbytes // max(1, info.shape[0]) // info.stored_dtype.itemsize)
    step = max(1, RUN_ELEMENTS // width)
    for start in range(0, info.shape[0], step):
        yield slice(start, min(start + step, info.shape[0]))
