"""The CPU module: move, pack and unpack, dequantize. Each says whether it did the work.

Who calls has checked shapes; here devices, dtypes and strides are checked before a pointer is taken.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qload.devices.operands import CodesInWords, Meaning
from qload.devices.tensors import FLOATS, address, block, dense, in_large_pages, is_plain
from qload.native import is_on, isa, load, threads
from qload.sentences import WORD_BITS, Digit, FieldMove, WordSentence
from qload.sentences.strided_digits import (
    WHOLE_BITS,
    Axis,
    Runs,
    axis_digits,
    fields_in_common,
    holds_whole_codes,
    in_common,
    inverse_digits,
    runs,
    stream_axis,
)

SCRATCH = 1 << 17  # bytes on each thread's stack, where a granule of a packing is spelled out
REGISTER = 64
BYTE = 8
PIECE = 2 << 20  # bytes of memory of each thread, of which it fills as many at once as stay in its caches
ALIGNED = 64  # bytes at whose multiples the memory of each thread begins


def move(source: Tensor, target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
    """Copy elements of `bits` bits: target[digits] = source[digits]."""
    cpu = _module(source, target)
    if cpu is None or bits > 64:
        return False
    if bits == 64:
        bits, digits = 32, [Digit(2, 1, 1), *(Digit(size, 2 * a, 2 * b) for size, a, b in digits)]
    cpu.move(isa(), bits, list(digits), source.data_ptr(), target.data_ptr(), threads())
    return True


def pack(packing: WordSentence, codes: Tensor, words: Tensor) -> int | None:
    """Pack int32 codes into words; returns the union of their bits, None without a native routine."""
    if not _fits(packing):
        found = runs(packing, tuple(codes.shape), codes.stride(), words.stride())
        fields = [FieldMove(f.code, f.word, f.low, f.bit, f.width) for f in packing.fields]
        return None if found is None else _fields(codes, words, fields, (packing.run, packing.words), found)
    rows, columns = axis_digits(packing.codes, tuple(codes.shape))
    if codes.stride(1) != 1:
        codes, rows, columns = codes.T, columns, rows
    if codes.stride(1) != 1 and codes.shape[1] > 1:
        return None
    return _pack(packing.bits, codes, rows, columns, None, None, words)


def unpack(packing: WordSentence, words: Tensor, codes: Tensor) -> bool:
    """Unpack words into new int32 codes."""
    cpu = _module(words, codes)
    if cpu is None or codes.dtype != torch.int32:
        return False
    if not _fits(packing):
        found = runs(packing, tuple(codes.shape), codes.stride(), words.stride())
        fields = [FieldMove(f.word, f.code, f.bit, f.low, f.width) for f in packing.fields]
        back = None if found is None else Runs(found.word, found.code, inverse_digits(found.digits))
        return back is not None and (
            _fields(words, codes, fields, (packing.words, packing.run), back) is not None
        )
    rows, columns = map(list, axis_digits(packing.codes, tuple(codes.shape)))
    whole = words.contiguous()
    at = whole.data_ptr(), codes.data_ptr(), codes.stride(0)
    cpu.unpack(isa(), packing.bits, rows, columns, *at, threads())
    return True


def repack(source: CodesInWords, target: WordSentence, words: Tensor) -> bool:
    """Repack words from one packing to another; False if that needs the codes as numbers."""
    packing = source.packing
    if packing.bits != target.bits:
        return False
    if _fits(packing) and _fits(target):
        here = axis_digits(packing.codes, packing.shape_of_codes(source.words.shape))
        there = axis_digits(target.codes, source.shape)
        if source.order is not None:
            places, (rows, columns) = _row_places(source, here), there[:: -1 if source.turned else 1]
            if places is None:
                return False
            codes = source.words.contiguous()
            return _pack(target.bits, codes, rows, columns, *places, words) is not None
        digits = in_common(here[::-1] if source.turned else here, there)
        return digits is not None and move(source.words.contiguous(), words, target.bits, digits)
    alike = (packing.pattern, packing.sizes) == (target.pattern, target.sizes)
    if not alike or source.turned or source.order is not None:
        return False
    strides = source.words.new_empty(source.shape, device="meta").stride()
    found = runs(target, source.shape, strides, words.stride())
    if found is None:
        return False
    both = [Digit(digit.size, digit.target, digit.target) for digit in found.digits]
    lying, run = Runs(found.word, found.word, both), (packing.words, target.words)
    fields = fields_in_common(packing, target)
    return _fields(source.words.contiguous(), words, fields, run, lying) is not None


def dequantize_words(codes: CodesInWords, meaning: Meaning, out: Tensor) -> bool:
    """Codes in words -> floats, rows of `out`, as many as it has, as its columns."""
    if not _fits(codes.packing):
        return _dequantize_stream(codes, meaning, out)
    cpu = _module(codes.words, out, *meaning.tensors())
    if cpu is None or not _takes(meaning, out) or (codes.order is not None and not codes.turned):
        return False
    packing, place = codes.packing, None
    axes = axis_digits(packing.codes, packing.shape_of_codes(codes.words.shape))
    rows, columns = axes[::-1] if codes.turned else axes
    if codes.order is not None:
        K = codes.order.numel()
        place = torch.empty(K, dtype=torch.int32)
        place[codes.order.long()] = torch.arange(K, dtype=torch.int32)
        meaning = _of_order(meaning, codes.order)
    words, meant = codes.words.contiguous(), values_of(meaning, out.shape[0], False, place, out.dtype)
    at = words.data_ptr(), *out.shape, out.data_ptr(), out.stride(0)
    cpu.dequantize(isa(), packing.bits, list(rows), list(columns), meant, *at, threads())
    return True


def dequantize_rows(codes: Tensor, bits: int, meaning: Meaning, high_first: bool, out: Tensor) -> bool:
    """Dequantize codes of 2 to 8 bits, in bytes in plain order row by row, to rows of `out`."""
    cpu = _module(codes, out, *meaning.tensors())
    if cpu is None or not _takes(meaning, out) or codes.stride(-1) != 1:
        return False
    meant = values_of(meaning, out.shape[0], high_first, None, out.dtype)
    at = codes.data_ptr(), codes.stride(0), *out.shape, out.data_ptr(), out.stride(0)
    cpu.dequantize_rows(isa(), bits, meant, *at, threads())
    return True


def dequantize_numbers(codes: Tensor, meaning: Meaning, out: Tensor) -> bool:
    """Codes as numbers -> floats, rows of `out`."""
    return codes.dtype == torch.uint8 and dequantize_rows(codes, BYTE, meaning, False, out)


def has_routines(*tensors: Tensor) -> bool:
    """Return whether native code takes these tensors."""
    return _module(*tensors) is not None


@lru_cache(maxsize=1024)
def _fits(packing: WordSentence) -> bool:
    """Return whether words hold whole codes, and granules fit the scratch space, along either axis."""
    rows, columns = packing.granule(0), packing.granule(1)
    lines = (
        a * -(-b * packing.bits // (8 * REGISTER)) * REGISTER for a, b in ((rows, columns), (columns, rows))
    )
    return holds_whole_codes(packing) and max(lines) <= SCRATCH


def _pack(
    bits: int,
    codes: Tensor,
    rows: Axis,
    columns: Axis,
    starts: Tensor | None,
    shifts: Tensor | None,
    words: Tensor,
) -> int | None:
    """Pack rows of codes; with `starts` and `shifts`, row r begins at a word and a bit of it."""
    cpu = _module(codes, words)
    if cpu is None or bits not in WHOLE_BITS:
        return None
    at = codes.data_ptr(), codes.stride(0), address(starts), address(shifts), words.data_ptr()
    seen: int = cpu.pack(isa(), bits, list(rows), list(columns), *at, threads())
    return seen


def _row_places(source: CodesInWords, axes: Sequence[Axis]) -> tuple[Tensor, Tensor] | None:
    """Word and bit at which each of the rows order[0], order[1], ... begins; None for codes in no rows."""
    (across, columns), order = axes, source.order
    per_word = WORD_BITS // source.packing.bits
    if order is None or len(columns) > 1 or columns[0].stride != per_word:
        return None
    starts = torch.zeros(1, dtype=torch.int64)
    for size, stride in across:
        starts = (torch.arange(size)[:, None] * stride + starts).flatten()
    at = starts[order.long()]
    return at // per_word, (at % per_word * source.packing.bits).to(torch.int32)


def _fields(
    source: Tensor, target: Tensor, moved: Sequence[FieldMove], words: tuple[int, int], lying: Runs
) -> int | None:
    """Bit fields of runs of int32 words; `words`: of a run on either side.

    All bits that the words read had, or None if nothing was done.
    """
    cpu = _module(source, target)
    if cpu is None:
        return None
    run = lying.code, lying.word
    at = source.data_ptr(), target.data_ptr()
    seen: int = cpu.fields(isa(), list(moved), *words, *run, list(lying.digits), *at, threads())
    return seen


def _dequantize_stream(codes: CodesInWords, meaning: Meaning, out: Tensor) -> bool:
    """Dequantize rows of a stream of codes of any width; words in the other order a block at a time."""
    words, bits = codes.words, codes.packing.bits
    if codes.order is not None or not has_routines(words, out):
        return False
    if stream_axis(codes.packing) != (0 if codes.turned else 1):
        return False
    if not codes.turned:
        return dequantize_rows(dense(words).view(torch.uint8), bits, meaning, False, out)
    step = max(1, 8 * block(out) // max(1, out.shape[1]))
    return not out.numel() or all(
        dequantize_rows(
            _transposed(words[:, start : start + step]).view(torch.uint8),
            bits,
            meaning.of_rows(slice(start, start + step)),
            False,
            out[start : start + step],
        )
        for start in range(0, out.shape[0], step)
    )


def _transposed(words: Tensor) -> Tensor:
    rows, columns = words.shape
    turned = words.new_empty(columns, rows)
    down, across = words.stride()
    move(words, turned, WORD_BITS, [Digit(rows, down, 1), Digit(columns, across, rows)])
    return turned


def _of_order(meaning: Meaning, order: Tensor) -> Meaning:
    """Meaning with the group of each code in storage order: value i belongs to code order[i]."""
    groups = meaning.k_group
    if groups is None:
        groups = torch.arange(order.numel(), dtype=torch.int32) // meaning.run
    lying = torch.empty_like(groups)
    lying[order.long()] = groups
    return replace(meaning, k_group=lying)


def _takes(meaning: Meaning, out: Tensor) -> bool:
    return (
        out.dtype in FLOATS
        and out.stride(-1) == 1
        and all(each.is_contiguous() for each in meaning.tensors())
    )


def values_of(
    meaning: Meaning,
    rows: int,
    high_first: bool,
    place: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[object, ...]:
    """Arguments for the module's `values`: a `meaning` of so many `rows`, its numbers rounded to a `dtype`.

    `high_first`: of two codes of 4 bits the first lies in the high half of a byte. `place`: int32, where each
    value of a row goes; None: where its code is.
    """
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
        max(1, rows // max(1, tables)),
        address(place),
        meaning.divide,
        meaning.factor,
        FLOATS.index(dtype),
    )


def _module(*tensors: Tensor) -> ModuleType | None:
    """CPU module for these tensors; None if it may not read their memory."""
    found = load("cpu").found
    if found is None or not is_on() or torch.compiler.is_compiling():
        return None
    for tensor in tensors:
        if not is_plain(tensor, "cpu"):
            return None
    return found


def move_from_file(source: tuple[int, int, int], target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
    """Copy elements of `bits` bits from a file: target[digits] = source[digits].

    `source`: of an open file the descriptor, where the elements begin, and their bytes. False where this was
    not done; what `target` holds then is nothing.
    """
    cpu, many = load("cpu").found, threads()
    if cpu is None or not has_routines(target):
        return False
    piece = min(PIECE, -(-source[2] // ALIGNED) * ALIGNED)
    scratch = in_large_pages(torch.empty(many * piece, dtype=torch.uint8, device="cpu"))
    at = target.data_ptr(), scratch.data_ptr()
    done: bool = cpu.move_from_file(isa(), bits, list(digits), source, *at, piece, many)
    return done


class FileMove(NamedTuple):
    """Elements of `bits` bits, by digits, of an open file's (descriptor, begin, bytes) to a target.

    Without digits bytes are read as they lie there.
    """

    source: tuple[int, int, int]
    target: Tensor
    bits: int
    digits: Sequence[Digit]


class CpuFileMover:
    """Threads of the CPU module for moves from files, without Python's lock.

    Parameters
    ----------
    module
        The CPU module.
    scratch
        Memory of the threads, `PIECE` bytes for each.
    """

    def __init__(self, module: Any, scratch: Tensor) -> None:
        self._mover = module.FileMover(isa(), scratch.data_ptr(), PIECE, scratch.nbytes // PIECE)
        self._scratch = scratch  # which goes after the threads that use it
        self._targets: dict[int, list[Tensor]] = {}  # of tickets that threads write to
        self._asked: list[list[Tensor]] = []  # of tickets that are not known yet

    @property
    def is_here(self) -> bool:
        """True in the process of the threads, False in a fork of it."""
        return bool(self._mover.is_here)

    def begin(self, moves: Sequence[FileMove]) -> int:
        """Begin moves to new memory on the CPU; returns a ticket for one `wait`. Only where `is_here`."""
        asked = [(bits, list(to), source, target.data_ptr()) for source, target, bits, to in moves]
        targets = [target for _, target, _, _ in moves]
        self._asked.append(targets)
        ticket: int = self._mover.begin(asked)
        self._targets[ticket] = self._asked.pop()
        return ticket

    def wait(self, ticket: int) -> list[bool]:
        """Wait for a ticket; returns for each move whether it succeeded. A failed target has no valid values.

        Empty where nobody knows any more: in a copy of the process, and where a wait was interrupted before.
        """
        made: list[bool] = []
        if self.is_here and ticket in self._targets:
            with suppress(ValueError):  # which was waited for, and then came an interrupt
                made = self._mover.wait(ticket)
        self._targets.pop(ticket, None)
        return made

    def close(self) -> None:
        """Cancel pending moves and wait for the running ones; later, no memory is written."""
        if self.is_here:
            self._mover.close()
        self._targets.clear()
        self._asked.clear()


def file_mover(threads: int) -> CpuFileMover | None:
    """Start threads for moves from files to memory of the CPU; None without the module."""
    scratch = in_large_pages(torch.empty(threads * PIECE, dtype=torch.uint8, device="cpu"))
    if not hasattr(os, "pread") or not has_routines(scratch):
        return None
    return CpuFileMover(load("cpu").found, scratch)
