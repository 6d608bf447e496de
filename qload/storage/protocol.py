"""What qload asks of a place that holds tensors."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qload.errors import ArgumentError, MissingTensorError

MAX_COMPARED_NAMES = 1000  # names that are compared with one that is missing
DTYPES = {  # by their names in a header
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as its header describes it.

    Attributes
    ----------
    dtype, shape
        Of the whole tensor, as it is stored.
    file
        The file it lies in; None in memory.
    shared
        Whether its bytes are those of another name too, which counts them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str | None = None
    shared: bool = False

    @property
    def nbytes(self) -> int:
        """How many bytes the whole tensor takes."""
        return prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class WeightStorage(Protocol):
    """Named tensors: what there is, and any rectangle of one.

    An implementer promises that `keys` and `info` read no values, that `read` hands out copies on the CPU,
    and that the tensors do not change while the storage is open. `MemoryStorage` and `SafetensorsStorage` do.
    """

    def keys(self) -> Collection[str]:
        """The names of all tensors."""

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file of the tensor `name`; MissingTensorError."""

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """A copy, on the CPU, of exactly the elements `index` of the tensor `name`.

        `index`: slices of step 1 within the shape, else ArgumentError; dimensions beyond the index are whole.
        """

    def close(self) -> None:
        """Let go of files; reading afterwards is an error."""


@runtime_checkable
class FillingStorage(Protocol):
    """A storage that reads into memory of the caller's, which spares a copy.

    One that has `read_bytes_into(asked)` too, as `SafetensorsStorage` does, is asked that for many pieces in
    one call, which spares threads what each call costs.
    """

    def read_into(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        """What `read` would hand out, written to `out`: on the CPU, in one piece, of that shape and dtype."""


def metadata_of(storage: WeightStorage) -> Mapping[str, Mapping[str, str]]:
    """Free text in the header of each file; empty for a storage without files."""
    found: Mapping[str, Mapping[str, str]] = getattr(storage, "metadata", {})
    return found


AskedBytes = tuple[str, tuple[slice, ...], np.ndarray]  # a name, an index, and memory for its bytes


def check_out(name: str, out: Tensor, extents: Sequence[int], dtype: torch.dtype) -> None:
    """A tensor can be read into as it lies, or ArgumentError."""
    fits = (tuple(out.shape), out.dtype, out.device.type) == (tuple(extents), dtype, "cpu")
    if not (fits and out.is_contiguous()):
        expected = f"{dtype} {tuple(extents)} on the CPU, in one piece, for {name}"
        raise ArgumentError("out", expected, f"{out.dtype} {tuple(out.shape)} on {out.device}")


def check_name(name: object) -> None:
    """A tensor's name is text, or ArgumentError."""
    if not isinstance(name, str):
        raise ArgumentError("name", "the name of a tensor", type(name).__name__)


def check_memory(name: str, memory: NDArray[np.uint8], nbytes: int) -> None:
    """Memory is one row of so many bytes, or ArgumentError."""
    fits = memory.dtype == np.uint8 and memory.shape == (nbytes,)
    if not (fits and memory.flags.c_contiguous and memory.flags.writeable):
        expected = f"a row of {nbytes} bytes that can be written, for {name}"
        raise ArgumentError("asked", expected, f"{memory.dtype} {memory.shape}")


def missing(name: str, keys: Collection[str]) -> MissingTensorError:
    """The error for a name that is not there, with the names that look like it."""
    return MissingTensorError(name, (name,), get_close_matches(name, _candidates(name, keys)))


def _candidates(name: str, keys: Collection[str]) -> list[str]:
    """The keys that are worth comparing, as that takes long: of many, those of as many dots and letters."""
    if len(name) > 200:
        return []
    if len(keys) <= MAX_COMPARED_NAMES:
        return list(keys)
    dots, length = name.count("."), len(name)
    like = (key for key in keys if abs(len(key) - length) <= 2 and key.count(".") == dots)
    return list(islice(like, MAX_COMPARED_NAMES))


def bounds(name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
    """(start, stop) of every dimension; ArgumentError for a step or for bounds outside of the shape."""
    if len(index) > len(shape):
        raise ArgumentError("index", f"at most {len(shape)} slices for {name} of shape {shape}", repr(index))
    whole = [slice(None)] * (len(shape) - len(index))
    pairs = []
    for piece, size in zip((*index, *whole), shape, strict=True):
        start = 0 if piece.start is None else piece.start
        stop = size if piece.stop is None else piece.stop
        if piece.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise ArgumentError("index", f"slices within shape {shape} of {name}, of step 1", repr(index))
        pairs.append((start, stop))
    return tuple(pairs)


RUN_ELEMENTS = 1 << 16  # elements of a run of rows: small, so that who stops at the first has read little


def rows(storage: WeightStorage, name: str) -> Iterator[tuple[int, Tensor]]:
    """A tensor in runs of whole rows (of its first dimension): (first row, the run)."""
    shape = storage.info(name).shape
    if not shape:
        yield 0, storage.read(name).reshape(1)
        return
    width = max(1, storage.info(name).nbytes // max(1, shape[0]) // storage.info(name).dtype.itemsize)
    step = max(1, RUN_ELEMENTS // width)
    for start in range(0, shape[0], step):
        yield start, storage.read(name, (slice(start, min(start + step, shape[0])),))
