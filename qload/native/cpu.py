"""The CPU module's routines on tensors: each says whether it did the work, so that torch does it otherwise.

Who calls has checked shapes; here devices, dtypes and strides are checked before a pointer is taken.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from qload.native.asked import is_on, isa, threads
from qload.native.built import load

PLAIN = (Tensor, torch.nn.Parameter)  # what is a tensor by another name has no memory of its own
PACKED = (2, 4, 8)  # bits of codes that words hold in whole numbers


class Digit(NamedTuple):
    """A digit of elements that move: how many values it has, and its strides in elements."""

    size: int
    source: int
    target: int


class Place(NamedTuple):
    """A digit of one axis of packed codes: how many values it has, and its stride in codes."""

    size: int
    stride: int


class Field(NamedTuple):
    """`width` bits from bit `source_bit` of word `source` of a run to bit `target_bit` of word `target`."""

    source: int
    target: int
    source_bit: int
    target_bit: int
    width: int


def move(source: Tensor, target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
    """target[digits] = source[digits], for elements of `bits` bits that lie in both."""
    cpu = _module(source, target)
    if cpu is None:
        return False
    if bits == 64:
        bits, digits = 32, [Digit(2, 1, 1), *(Digit(size, 2 * a, 2 * b) for size, a, b in digits)]
    cpu.move(isa(), bits, list(digits), source.data_ptr(), target.data_ptr(), threads())
    return True


def pack(
    codes: Tensor,
    bits: int,
    rows: Sequence[Place],
    columns: Sequence[Place],
    words: Tensor,
) -> int | None:
    """int32 codes (rows, columns) -> words; all bits that the codes had, or None if nothing was done."""
    cpu = _module(codes, words)
    if cpu is None or bits not in PACKED:
        return None
    if codes.stride(1) != 1:
        codes, rows, columns = codes.T, columns, rows
    if codes.stride(1) != 1 and codes.shape[1] > 1:
        return None
    seen: int = cpu.pack(
        isa(),
        bits,
        list(rows),
        list(columns),
        codes.data_ptr(),
        codes.stride(0),
        0,
        0,
        words.data_ptr(),
        threads(),
    )
    return seen


def unpack(words: Tensor, bits: int, rows: Sequence[Place], columns: Sequence[Place], codes: Tensor) -> bool:
    """Words -> int32 codes (rows, columns), contiguous."""
    cpu = _module(words, codes)
    if cpu is None or bits not in PACKED:
        return False
    cpu.unpack(
        isa(), bits, list(rows), list(columns), words.data_ptr(), codes.data_ptr(), codes.stride(0), threads()
    )
    return True


def fields(
    source: Tensor,
    target: Tensor,
    moved: Sequence[Field],
    words: tuple[int, int],
    strides: tuple[int, int],
    lanes: Sequence[Digit],
) -> int | None:
    """Bit fields of runs of int32 words; `words`, `strides`: of a run on either side.

    All bits that the words read had, or None if nothing was done.
    """
    cpu = _module(source, target)
    if cpu is None:
        return None
    seen: int = cpu.fields(
        isa(), list(moved), *words, *strides, list(lanes), source.data_ptr(), target.data_ptr(), threads()
    )
    return seen


def _module(*tensors: Tensor) -> ModuleType | None:
    """The CPU module, where it may touch these tensors."""
    found = load("cpu").found
    if found is None or not is_on() or torch.compiler.is_compiling():
        return None
    return found if all(map(_is_plain, tensors)) else None


def _is_plain(tensor: Tensor) -> bool:
    grad = tensor.requires_grad and torch.is_grad_enabled()
    strided = tensor.layout == torch.strided
    return type(tensor) in PLAIN and tensor.device.type == "cpu" and strided and not grad
