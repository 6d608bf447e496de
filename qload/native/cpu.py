"""The CPU module's routines on tensors: each says whether it did the work, so that torch does it otherwise.

Who calls has checked shapes; here devices, dtypes and strides are checked before a pointer is taken.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from qload.native.held import OUT, Meaning, address, is_plain
from qload.native.modules import load
from qload.native.settings import is_on, isa, threads

PACKED = (2, 4, 8)  # bits of codes that words hold in whole numbers
SCRATCH = 1 << 17  # bytes on each thread's stack, where a granule of a packing is spelled out
REGISTER = 64


class Digit(NamedTuple):
    """A digit of elements that move: how many values it has, and its strides in elements."""

    size: int
    source: int
    target: int


class AxisDigit(NamedTuple):
    """A digit of one axis of packed codes: how many values it has, and its stride in codes."""

    size: int
    stride: int


class FieldMove(NamedTuple):
    """`width` bits from bit `source_bit` of word `source` of a run to bit `target_bit` of word `target`."""

    source: int
    target: int
    source_bit: int
    target_bit: int
    width: int


def move(source: Tensor, target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
    """target[digits] = source[digits], for elements of `bits` bits that lie in both."""
    cpu = _module(source, target)
    if cpu is None or bits > 64:
        return False
    if bits == 64:
        bits, digits = 32, [Digit(2, 1, 1), *(Digit(size, 2 * a, 2 * b) for size, a, b in digits)]
    cpu.move(isa(), bits, list(digits), source.data_ptr(), target.data_ptr(), threads())
    return True


def fits(bits: int, rows: int, columns: int) -> bool:
    """Whether granules of a packing fit the scratch space, whichever axis is taken for rows."""
    lines = (a * -(-b * bits // (8 * REGISTER)) * REGISTER for a, b in ((rows, columns), (columns, rows)))
    return max(lines) <= SCRATCH


def pack(
    codes: Tensor, bits: int, rows: Sequence[AxisDigit], columns: Sequence[AxisDigit], words: Tensor
) -> int | None:
    """int32 codes (rows, columns) -> words; all bits that the codes had, or None if nothing was done."""
    if codes.stride(1) != 1:
        codes, rows, columns = codes.T, columns, rows
    if codes.stride(1) != 1 and codes.shape[1] > 1:
        return None
    return _pack(codes, bits, rows, columns, None, None, words)


def gather(
    source: Tensor,
    bits: int,
    rows: Sequence[AxisDigit],
    columns: Sequence[AxisDigit],
    starts: Tensor,
    shifts: Tensor,
    words: Tensor,
) -> bool:
    """Packs rows of which each lies in words of its own: from word starts[r] of `source`, bit shifts[r]."""
    return _pack(source, bits, rows, columns, starts, shifts, words) is not None


def _pack(
    codes: Tensor,
    bits: int,
    rows: Sequence[AxisDigit],
    columns: Sequence[AxisDigit],
    starts: Tensor | None,
    shifts: Tensor | None,
    words: Tensor,
) -> int | None:
    cpu = _module(codes, words)
    if cpu is None or bits not in PACKED:
        return None
    at = codes.data_ptr(), codes.stride(0), address(starts), address(shifts), words.data_ptr()
    seen: int = cpu.pack(isa(), bits, list(rows), list(columns), *at, threads())
    return seen


def unpack(
    words: Tensor, bits: int, rows: Sequence[AxisDigit], columns: Sequence[AxisDigit], codes: Tensor
) -> bool:
    """Words -> int32 codes (rows, columns), contiguous."""
    cpu = _module(words, codes)
    if cpu is None or bits not in PACKED or codes.dtype != torch.int32:
        return False
    cpu.unpack(
        isa(), bits, list(rows), list(columns), words.data_ptr(), codes.data_ptr(), codes.stride(0), threads()
    )
    return True


def fields(
    source: Tensor,
    target: Tensor,
    moved: Sequence[FieldMove],
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


def dequantize(
    words: Tensor,
    bits: int,
    rows: Sequence[AxisDigit],
    columns: Sequence[AxisDigit],
    meaning: Meaning,
    place: Tensor | None,
    out: Tensor,
) -> bool:
    """Packed codes -> floats, rows of `out`, as many as it has, as its columns; column k goes to place[k]."""
    cpu = _module(words, out, *meaning.tensors())
    if cpu is None or bits not in PACKED or not _takes(meaning, out):
        return False
    meant = _meant(meaning, place, out, high_first=False)
    at = words.data_ptr(), *out.shape, out.data_ptr(), out.stride(0)
    cpu.dequantize(isa(), bits, list(rows), list(columns), meant, *at, threads())
    return True


def dequantize_rows(codes: Tensor, bits: int, meaning: Meaning, high_first: bool, out: Tensor) -> bool:
    """Bytes that hold codes of 2 to 8 bits in plain order, row by row -> floats, rows of `out`."""
    cpu = _module(codes, out, *meaning.tensors())
    if cpu is None or not _takes(meaning, out) or codes.stride(-1) != 1:
        return False
    meant = _meant(meaning, None, out, high_first)
    at = codes.data_ptr(), codes.stride(0), *out.shape, out.data_ptr(), out.stride(0)
    cpu.dequantize_rows(isa(), bits, meant, *at, threads())
    return True


def _takes(meaning: Meaning, out: Tensor) -> bool:
    return (
        out.dtype in OUT and out.stride(-1) == 1 and all(each.is_contiguous() for each in meaning.tensors())
    )


def _meant(meaning: Meaning, place: Tensor | None, out: Tensor, high_first: bool) -> tuple[object, ...]:
    """What the module calls `values`."""
    tables, groups = meaning.scales.shape
    return (
        high_first,
        address(meaning.lookup),
        meaning.scales.data_ptr(),
        address(meaning.zeros),
        groups,
        address(meaning.k_group),
        meaning.run,
        address(meaning.n_group),
        max(1, out.shape[0] // max(1, tables)),
        address(place),
        meaning.divide,
        meaning.factor,
        OUT[out.dtype],
    )


def has_routines(*tensors: Tensor) -> bool:
    """Whether there is native code for tensors like these."""
    return _module(*tensors) is not None


def _module(*tensors: Tensor) -> ModuleType | None:
    """The CPU module, where it may touch these tensors."""
    found = load("cpu").found
    if found is None or not is_on() or torch.compiler.is_compiling():
        return None
    return found if all(is_plain(tensor, "cpu") for tensor in tensors) else None
