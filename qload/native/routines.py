"""The one place where a device decides: routines of the CPU module, or of the CUDA module, on tensors.

Each says whether it did the work; where there is no module for a device, none does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qload.native import cpu, cuda
from qload.native.cpu import AxisDigit, Digit, FieldMove
from qload.native.held import Meaning

BYTE, WORD_BITS = 8, 32


def move(source: Tensor, target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
    """target[digits] = source[digits], for elements of `bits` bits that lie in both."""
    if target.is_cuda:
        return cuda.move(source, target, bits, digits)
    return cpu.move(source, target, bits, digits)


def pack(
    codes: Tensor, bits: int, rows: Sequence[AxisDigit], columns: Sequence[AxisDigit], words: Tensor
) -> int | None:
    """int32 codes (rows, columns) -> words; all bits that the codes had, or None if nothing was done."""
    if words.is_cuda:
        return cuda.pack(codes, bits, rows, columns, words)
    return cpu.pack(codes, bits, rows, columns, words)


def unpack(
    words: Tensor, bits: int, rows: Sequence[AxisDigit], columns: Sequence[AxisDigit], codes: Tensor
) -> bool:
    """Words -> codes (rows, columns), contiguous."""
    if codes.is_cuda:
        return cuda.unpack(words, bits, rows, columns, codes)
    return cpu.unpack(words, bits, rows, columns, codes)


def gather(
    source: Tensor,
    bits: int,
    order: Tensor,
    lying: tuple[Sequence[AxisDigit], Sequence[AxisDigit]],
    rows: Sequence[AxisDigit],
    columns: Sequence[AxisDigit],
    words: Tensor,
) -> bool:
    """Packs rows order[0], order[1], ... of codes; `lying`: where their rows and columns are in `source`."""
    if words.is_cuda:
        return cuda.gather(source, bits, order, lying, rows, columns, words)
    per_word, across = WORD_BITS // bits, lying[1]
    if len(across) > 1 or across[0].stride != per_word:  # only words side by side
        return False
    starts = torch.zeros(1, dtype=torch.int64)
    for size, stride in lying[0]:
        starts = (torch.arange(size)[:, None] * stride + starts).flatten()
    at = starts[order.long()]
    shifts = (at % per_word * bits).to(torch.int32)
    return cpu.gather(source, bits, rows, columns, at // per_word, shifts, words)


def fields(
    source: Tensor,
    target: Tensor,
    moved: Sequence[FieldMove],
    words: tuple[int, int],
    strides: tuple[int, int],
    lanes: Sequence[Digit],
) -> int | None:
    """Bit fields of runs of int32 words: on a CPU alone."""
    return None if target.is_cuda else cpu.fields(source, target, moved, words, strides, lanes)


def dequantize(
    words: Tensor,
    bits: int,
    rows: Sequence[AxisDigit],
    columns: Sequence[AxisDigit],
    meaning: Meaning,
    place: Tensor | None,
    out: Tensor,
) -> bool:
    """Packed codes -> floats, rows of `out`; the value of column k goes to column place[k]."""
    if out.is_cuda:
        return place is None and cuda.dequantize(words, bits, rows, columns, meaning, out)
    return cpu.dequantize(words, bits, rows, columns, meaning, place, out)


def dequantize_rows(codes: Tensor, bits: int, meaning: Meaning, high_first: bool, out: Tensor) -> bool:
    """uint8 codes in plain order, packed row by row -> floats, rows of `out`."""
    if not out.is_cuda:
        return cpu.dequantize_rows(codes, bits, meaning, high_first, out)
    return bits == BYTE and cuda.dequantize_single(codes, meaning, out)


def dequantize_numbers(codes: Tensor, meaning: Meaning, out: Tensor) -> bool:
    """Codes as numbers -> floats, rows of `out`."""
    if out.is_cuda:
        return cuda.dequantize_single(codes, meaning, out)
    return codes.dtype == torch.uint8 and cpu.dequantize_rows(codes, BYTE, meaning, False, out)


def has_routines(*tensors: Tensor) -> bool:
    """Whether there is native code for tensors like these."""
    return cuda.has_routines(*tensors) if tensors[0].is_cuda else cpu.has_routines(*tensors)
