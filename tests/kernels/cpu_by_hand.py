"""The CPU module in plain torch, slowly: what csrc/cpu/bindings.cpp says, from pointers and strides alone."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from qload import native
from qload.devices.tensors import FLOATS
from qload.native import modules
from tests.kernels import cuda_by_hand

UNSIGNED = {8: torch.uint8, 16: torch.int16, 32: torch.int32}  # only bits of these are moved
WORD_BITS = 32
NO_SCALES, EXPONENTS, E4M3 = range(3)


def at(pointer: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """View of the numbers from a pointer on; a null pointer has none."""
    return cuda_by_hand.at(pointer, dtype, *shape) if 0 not in shape else torch.empty(shape, dtype=dtype)


def places(digits: Sequence[tuple[int, int]]) -> Tensor:
    """Offset of each position of an axis, from its digits (size, stride), innermost first."""
    found = torch.zeros(1, dtype=torch.int64)
    for size, stride in digits:
        found = (torch.arange(size)[:, None] * stride + found).flatten()
    return found


def extent(*axes: Tensor) -> int:
    """Elements up to the last place of a matrix."""
    return sum(int(axis.max()) for axis in axes) + 1 if all(map(len, axes)) else 0


def elements(pointer: int, bits: int, count: int) -> tuple[Tensor, Tensor]:
    """The first elements of some bits at a pointer, as a copy, and the memory of these."""
    if bits >= 8:
        memory = at(pointer, UNSIGNED[bits], count)
        return memory.clone(), memory
    memory = at(pointer, torch.uint8, -(-count * bits // 8))
    return (memory[:, None] >> torch.arange(0, 8, bits) & 2**bits - 1).flatten(), memory


def write(memory: Tensor, bits: int, values: Tensor) -> None:
    """Write elements back to their memory."""
    if bits >= 8:
        memory.copy_(values)
        return
    shifted = values.view(-1, 8 // bits).int() << torch.arange(0, 8, bits)
    memory.copy_(shifted.sum(1).to(torch.uint8))


def matrix(pointer: int, dtype: torch.dtype, rows: int, columns: int, pitch: int) -> Tensor:
    """Rows of some columns, `pitch` elements apart."""
    memory = at(pointer, dtype, (rows - 1) * pitch + columns if rows and columns else 0)
    return memory.as_strided((rows, columns), (pitch, 1))


class Values(NamedTuple):
    """The `values` of csrc/cpu/bindings.cpp."""

    high_first: bool
    lookup: int
    scale: int
    zero: int
    groups: int
    group: int
    run: int
    row_group: int
    row_run: int
    place: int
    divide: bool
    factor: float
    out_type: int

    def of(self, codes: Tensor, bits: int, scales: Tensor | None = None) -> Tensor:
        """Float32 values of codes (N, K); `scales`: in place of the table's."""
        N, K = codes.shape
        row = at(self.row_group, torch.int32, N).long() if self.row_group else torch.arange(N) // self.row_run
        column = at(self.group, torch.int32, K).long() if self.group else torch.arange(K) // self.run
        size = (int(row.max()) + 1 if N else 0), self.groups
        table = at(self.scale, torch.float32, *size) if scales is None else scales
        values = at(self.lookup, torch.float32, 2**bits)[codes.long()] if self.lookup else codes.float()
        if self.zero:
            values = values - at(self.zero, torch.float32, *size)[row][:, column]
        scale = table[row][:, column]
        values = (values / scale if self.divide else values * scale) * self.factor
        if not self.place:
            return values
        moved = torch.empty_like(values)
        moved[:, at(self.place, torch.int32, K).long()] = values
        return moved

    def rows(self, bits: int, codes: int, row_bytes: int, shape: tuple[int, int]) -> Tensor:
        """Codes (N, K) of rows of bytes."""
        N, K = shape
        held = matrix(codes, torch.uint8, N, -(-K * bits // 8), row_bytes)
        each = (held[:, :, None] >> torch.arange(8) & 1).flatten(1)[:, : K * bits].view(N, K, bits)
        found = (each.int() << torch.arange(bits)).sum(2)
        if not self.high_first:
            return found
        assert bits == 4
        other = torch.nn.functional.pad(found, (0, K % 2)).view(N, -(-K // 2), 2).flip(2).flatten(1)
        if K % 2:  # the last code lies in the high half of its byte
            other[:, -1] = held[:, -1].int() >> 4
        return other[:, :K]


def typed(typed: tuple[int, int], *size: int) -> Tensor:
    """Floats at (address, number of the type)."""
    return at(typed[0], FLOATS[typed[1]], *size)


class FileMover:
    """Moves at the time of `wait`; a ticket has one wait."""

    def __init__(self, isa: str, scratch: int, piece: int, threads: int) -> None:
        assert scratch % 64 == 0
        self._isa, self._scratch, self._piece, self._threads = isa, scratch, piece, threads
        self._process, self._tickets = os.getpid(), count(1)
        self._asked: dict[int, list[Any]] = {}

    @property
    def is_here(self) -> bool:
        return self._process == os.getpid()

    def begin(self, asked: list[tuple[int, Any, tuple[int, int, int], int]]) -> int:
        ticket = next(self._tickets)
        self._asked[ticket] = asked
        return ticket

    def wait(self, ticket: int) -> list[bool]:
        if ticket not in self._asked:
            raise ValueError(f"nobody waits for {ticket}")
        how = self._scratch, self._piece, self._threads
        asked = self._asked.pop(ticket)
        return [
            Hand.move_from_file(self._isa, bits, to, source, out, *how) for bits, to, source, out in asked
        ]

    def close(self) -> None:
        self._asked.clear()


class Hand:
    """A module `_cpu`."""

    FileMover = FileMover

    @staticmethod
    def isas() -> list[str]:
        return ["scalar"]

    @staticmethod
    def is_on_threads_of_torch() -> bool:
        return False

    @staticmethod
    def move(isa: str, bits: int, digits: Any, source: int, target: int, threads: int) -> None:
        assert type(digits) is list
        assert threads >= 1
        assert isa in modules.ISAS
        here, there = (places([(digit[0], digit[1 + side]) for digit in digits]) for side in (0, 1))
        values, _ = elements(source, bits, extent(here))
        result, memory = elements(target, bits, extent(there))
        result[there] = values[here]
        write(memory, bits, result)

    @staticmethod
    def move_from_file(
        isa: str, bits: int, digits: Any, source: tuple[int, int, int], target: int,
        scratch: int, piece: int, threads: int,
    ) -> bool:  # fmt: skip
        descriptor, begin, size = source
        at(scratch, torch.uint8, threads * piece)[-1] = 0
        held = os.pread(descriptor, size, begin)
        if len(held) < size:
            return False
        read = torch.frombuffer(bytearray(held), dtype=torch.uint8) if held else torch.empty(0)
        if digits and size:
            Hand.move(isa, bits, digits, read.data_ptr(), target, threads)
        else:
            at(target, torch.uint8, size).copy_(read)
        return True

    @staticmethod
    def pack(
        isa: str, bits: int, rows: Any, columns: Any, codes: int, pitch: int,
        source: int, shift: int, words: int, threads: int,
    ) -> int:  # fmt: skip
        down, across = places(rows), places(columns)
        starts = at(source, torch.int64, len(down)) if source else torch.arange(len(down)) * pitch
        each = starts[:, None] + torch.arange(len(across))
        read = at(codes, torch.int32, extent(each.flatten()))[each].long() & 2**WORD_BITS - 1
        read = read >> at(shift, torch.int32, len(down))[:, None] if shift else read
        result, memory = elements(words, bits, extent(down, across))
        result[down[:, None] + across] = (read & 2**bits - 1).to(result.dtype)
        write(memory, bits, result)
        found = 0
        for code in [] if shift else read.unique().tolist():
            found |= code
        return found

    @staticmethod
    def unpack(
        isa: str, bits: int, rows: Any, columns: Any, words: int, codes: int, pitch: int, threads: int
    ) -> None:
        down, across = places(rows), places(columns)
        values, _ = elements(words, bits, extent(down, across))
        out = matrix(codes, torch.int32, len(down), len(across), pitch)
        out.copy_(values[down[:, None] + across])

    @staticmethod
    def fields(
        isa: str, fields: Any, from_words: int, to_words: int, from_word: int, to_word: int,
        lanes: Any, source: int, target: int, threads: int,
    ) -> int:  # fmt: skip
        here, there = (places([(lane[0], lane[1 + side]) for lane in reversed(lanes)]) for side in (0, 1))
        starts = [torch.arange(size) * step for size, step in ((from_words, from_word), (to_words, to_word))]
        read = at(source, torch.int32, extent(here, starts[0]))[here[:, None] + starts[0]].long()
        read &= 2**WORD_BITS - 1
        made = torch.zeros(len(here), to_words, dtype=torch.int64)
        for one, other, low, to_low, width in fields:
            made[:, other] |= (read[:, one] >> low & 2**width - 1) << to_low
        out = at(target, torch.int32, extent(there, starts[1]))
        out[there[:, None] + starts[1]] = torch.where(made >= 2**31, made - 2**WORD_BITS, made).int()
        found = 0
        for word in read.unique().tolist():
            found |= word
        return found

    @staticmethod
    def dequantize(
        isa: str, bits: int, rows: Any, columns: Any, values: Any, words: int,
        height: int, width: int, out: int, pitch: int, threads: int,
    ) -> None:  # fmt: skip
        down, across, meant = places(rows)[:height], places(columns)[:width], Values(*values)
        codes, _ = elements(words, bits, extent(down, across))
        y = matrix(out, FLOATS[meant.out_type], height, width, pitch)
        y.copy_(meant.of(codes[down[:, None] + across], bits))

    @staticmethod
    def dequantize_rows(
        isa: str, bits: int, values: Any, codes: int, row_bytes: int, rows: int, columns: int,
        out: int, pitch: int, threads: int,
    ) -> None:  # fmt: skip
        meant = Values(*values)
        y = matrix(out, FLOATS[meant.out_type], rows, columns, pitch)
        y.copy_(meant.of(meant.rows(bits, codes, row_bytes, (rows, columns)), bits))

    @staticmethod
    def multiply(
        isa: str, bits: int, sizes: Any, x: tuple[int, int], perm: int, words: int, scales: tuple[int, int],
        zeros: int, zero: int, offsets: tuple[int, bool], bias: int, y: tuple[int, int],
        few: int, threads: int,
    ) -> None:  # fmt: skip
        M, K, N, rows, group, run, pitch = sizes
        inputs = matrix(x[0], FLOATS[x[1]], M, K, pitch).float()
        order = at(perm, torch.int32, K).long() if perm else torch.arange(K)
        tiles = -(-N // 16)
        packed, _ = elements(words, bits, tiles * rows * 16)
        codes = packed.view(tiles, rows * bits // 32, 16, 32 // bits).transpose(2, 3).reshape(tiles, rows, 16)
        size = tiles, rows // run, 16
        each_zero = at(zeros, torch.uint8, *size).float() if zeros else torch.full(size, float(zero))
        scale, (address, of_codes) = typed(scales, *size).float(), offsets
        weight = (codes.float() - each_zero.repeat_interleave(run, 1)) * scale.repeat_interleave(run, 1)
        if address:
            offset = typed((address, scales[1]), *size).float() * (scale if of_codes else 1)
            weight = weight - offset.repeat_interleave(run, 1)
        at_row = torch.arange(K) // group * run + torch.arange(K) % group
        sums = inputs[:, order] @ weight[:, at_row].permute(1, 0, 2).flatten(1)[:, :N]
        sums = sums + at(bias, torch.float32, N) if bias else sums
        typed(y, M, N).copy_(sums)

    @staticmethod
    def multiply_rows(
        isa: str, bits: int, sizes: Any, x: tuple[int, int], values: Any, scales: tuple[int, float, bool],
        codes: int, row_bytes: int, bias: int, y: tuple[int, int], threads: int,
    ) -> None:  # fmt: skip
        (M, K, N, pitch), meant, (kind, second, divided) = sizes, Values(*values), scales
        assert not meant.place
        table = None
        if kind != NO_SCALES:
            tables = -(-N // meant.row_run)
            read = at(meant.scale, torch.uint8, tables, meant.groups)
            table = torch.exp2(read.double() - 127).float()
            table = table if kind == EXPONENTS else read.view(torch.float8_e4m3fn).float()
            table = table / second if divided else table * second
        weight = meant.of(meant.rows(bits, codes, row_bytes, (N, K)), bits, table)
        sums = matrix(x[0], FLOATS[x[1]], M, K, pitch).float() @ weight.T
        sums = sums + at(bias, torch.float32, N) if bias else sums
        typed(y, M, N).copy_(sums)

    @staticmethod
    def multiply_codes(
        isa: str, sizes: Any, x: int, codes: int, row_bytes: int, sums: int, threads: int
    ) -> None:
        M, K, N = sizes
        if K >= 1 << 16:
            raise ValueError("an int32 does not hold sums of so many codes")
        weight = matrix(codes, torch.int8, N, K, row_bytes).long()
        at(sums, torch.int32, M, N).copy_(at(x, torch.int8, M, K).long() @ weight.T)


@contextmanager
def installed() -> Iterator[None]:
    """Install `Hand` as the CPU module on machines without a built one."""
    if native.available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(modules._LOADED_MODULES, "cpu", modules.NativeModule(Hand))  # type: ignore[arg-type]
        yield
