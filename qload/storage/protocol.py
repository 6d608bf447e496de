"""What qload asks of a place that holds tensors."""

from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from qload.errors import ArgumentError, MissingTensorError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as its header describes it: dtype, shape, and the file it lies in (None in memory)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes the whole tensor takes."""
        return prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class WeightStorage(Protocol):
    """Named tensors: what there is, and any rectangle of one."""

    def keys(self) -> Collection[str]:
        """The names of all tensors."""

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file of a tensor; MissingTensorError."""

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """A copy, on the CPU, of exactly those elements; dimensions beyond the index are whole."""

    def close(self) -> None:
        """Let go of files; reading afterwards is an error."""


def check_name(name: object) -> None:
    """A tensor's name is text, or ArgumentError."""
    if not isinstance(name, str):
        raise ArgumentError("name", "the name of a tensor", type(name).__name__)


def missing(name: str, keys: Collection[str]) -> MissingTensorError:
    """The error for a name that is not there, with the names that look like it."""
    return MissingTensorError(name, (name,), get_close_matches(name, keys))


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
