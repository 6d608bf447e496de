"""How typed weights lie in memory, as the dequantize kernel takes it: codes, digits, scales, zero points."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qload.formats import AWQWeight, BNBFP4Weight, BNBNF4Weight, CTPackWeight, GPTQWeight, MarlinWeight
from qload.kernel_formats.exllama import ExllamaWeight
from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.layouts import (
    Stored,
    StoredMinusOne,
    StoredMinusOnePerField,
    StoredMinusOneUnmasked,
    ZeroPoints,
    awq,
    compressed_tensors,
    exllama,
    gptq,
    marlin,
)
from qload.layouts import strides as places
from qload.layouts.order import Order
from qload.layouts.packing import Packing
from qload.native.cuda import CONSTANT, INT32, NONE, WORDS
from qload.spec import Codes, Weight

WORD_BITS = 32
PLAIN = 0x543210  # hex digit i: where bit i of a column's number goes in a kernel's order
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Single:
    """Codes one by one, and their meaning up to N and K."""

    codes: Tensor
    meaning: tuple[Any, ...]


@dataclass(frozen=True)
class Packed:
    """Codes in words, the digits that bring them into rows 2**row_bits codes apart, and their meaning."""

    codes: Tensor
    meaning: tuple[Any, ...]
    bits: int
    digits: list[places.Digit]
    row_bits: int


@dataclass(frozen=True)
class Table:
    """Codes of a table of 16 values, two a byte, high bits first, in flat blocks of 2**block_bits."""

    codes: Tensor
    table: Tensor
    scales: Tensor
    block_bits: int


def of_codes(codes: Codes) -> Single:
    """Any format, through its codes."""
    N, K = codes.codes.shape
    scales, zeros = codes.scales, None if codes.zeros is None else codes.zeros
    if zeros is not None and zeros.dtype != torch.int32:
        zeros = zeros.to(torch.int32)
    one = codes.n_group is None and scales.shape[0] == 1
    strides = [
        0 if one else scales.stride(0),
        scales.stride(1),
        0 if zeros is None or one else zeros.stride(0),
        0 if zeros is None else zeros.stride(1),
        1,
        max(K, 1),
    ]
    zero = [NONE if zeros is None else INT32, 0, 4, 0, 0, -1]
    lookup = None if codes.lookup is None else codes.lookup.float().contiguous()
    n_group, k_group = (None if t is None else t.to(torch.int32) for t in (codes.n_group, codes.k_group))
    meaning = (scales, zeros, lookup, n_group, k_group, strides, zero, codes.divide, codes.factor, N, K)
    return Single(codes.plain(), meaning)


def packed(weight: Weight) -> Packed | None:
    """A weight whose words a plan moves; None for every other."""
    if isinstance(weight, GPTQWeight):
        return _gptq(weight, gptq.rows(weight.config.bits), weight.config.positional)
    if isinstance(weight, ExllamaWeight):
        return None if weight.q_perm is not None else _gptq(weight, exllama.rows(weight.config.bits), False)
    if isinstance(weight, AWQWeight):
        return _awq(weight)
    if isinstance(weight, GPTQMarlinWeight):
        return _marlin(weight) if weight.perm is None and weight.padded_shape == weight.shape else None
    if isinstance(weight, MarlinWeight):
        return _marlin_checkpoint(weight)
    return _compressed(weight) if isinstance(weight, CTPackWeight) else None


def table(weight: Weight) -> Table | None:
    """A weight whose codes lie flat and say which value of a table they are; None for every other."""
    if not isinstance(weight, BNBNF4Weight | BNBFP4Weight):
        return None
    codes, size = weight.weight.contiguous(), weight.config.blocksize
    tensors = (weight.absmax, weight.quant_map)
    if size % 8 or size & (size - 1) or codes.data_ptr() % 4 or not all(t.is_contiguous() for t in tensors):
        return None
    return Table(codes.view(torch.uint8), weight.quant_map, weight.absmax, size.bit_length() - 1)


def _gptq(weight: Any, rows: Packing, in_order: bool) -> Packed | None:
    groups, run = weight.scales.shape[0], weight.shape[1]
    if in_order and weight.config.group_size > 0:
        run = weight.config.group_size
    elif groups > 1 and isinstance(weight, ExllamaWeight):
        run, in_order = weight.config.run, weight.config.run > 0
    table = None if in_order or groups == 1 else weight.g_idx.to(torch.int32).contiguous()
    zero = zero_rule(weight.config.zeros, weight.config.bits)
    return _rows(weight, weight.qweight, rows, weight.scales, weight.qzeros, zero, run, table)


def _awq(weight: AWQWeight) -> Packed | None:
    bits, groups, K = weight.config.bits, weight.scales.shape[0], weight.shape[1]
    order, rule = awq.columns(bits).codes, _stored(bits)
    here = PLAIN, columns_in(order)
    return _rows(
        weight, weight.qweight, awq.columns(bits), weight.scales, weight.qzeros, rule, K // groups, here=here
    )


def _marlin(weight: GPTQMarlinWeight) -> Packed | None:
    bits, groups, K = weight.config.bits, weight.scales.shape[0], weight.shape[1]
    here = columns_in(marlin.scales(groups)), columns_in(marlin.zeros(bits).codes)
    run, rows = weight.config.rows_of_a_group(K), weight.order(bits)
    return _rows(weight, weight.qweight, rows, weight.scales, weight.qzeros, _stored(bits), run, here=here)


def _marlin_checkpoint(weight: MarlinWeight) -> Packed | None:
    order = marlin.SCALES_PER_COLUMN if weight.config.group_size == -1 else marlin.SCALES_GROUPED
    run, rows = weight.config.rows_of_a_group(weight.shape[1]), marlin.rows(weight.config.bits)
    here = columns_in(order), PLAIN
    return _rows(weight, weight.B, rows, weight.s, None, _stored(rows.bits), run, here=here)


def _compressed(weight: CTPackWeight) -> Packed | None:
    (N, K), config, scales = weight.shape, weight.config, weight.weight_scale
    rows = compressed_tensors.rows(config.bits, True)
    if not places.moves(rows) or not scales.is_contiguous() or K % (WORD_BITS // config.bits):
        return None
    index, zeros = weight.weight_g_idx, weight.weight_zero_point
    target, row_bits = _target(N, K)
    digits = places.digits(places.places(rows.codes, (N, K)), target)
    if digits is None:
        return None
    groups, zero, at = scales.shape[1], [CONSTANT, 2 ** (config.bits - 1), 4, 0, 0, -1], (0, 0)
    if zeros is not None:  # packed along N, beside each other along G
        zeros, zero = compressed_tensors.unpack(zeros.T, N, config.bits, True), [INT32, 0, 4, 0, 0, -1]
        at = (zeros.stride(1), zeros.stride(0))
    run = config.group_size if config.group_size > 0 else max(K, 1)
    strides = [groups, 1, *at, 1, run]
    table = None if index is None else index.to(torch.int32).contiguous()
    meaning = (scales, zeros, None, None, table, strides, zero, False, 1.0)
    return Packed(weight.weight_packed.contiguous(), (*meaning, N, K), config.bits, digits, row_bits)


def _rows(
    weight: Weight,
    words: Tensor,
    rows: Packing,
    scales: Tensor,
    zeros: Tensor | None,
    zero: list[int],
    run: int,
    table: Tensor | None = None,
    here: tuple[int, int] = (PLAIN, PLAIN),
) -> Packed | None:
    """Codes (K, N) in `rows`, scales (G, N), zero points (G, N) packed along N, in the orders `here`."""
    N, K = weight.shape
    if not places.moves(rows) or K % (WORD_BITS // rows.bits) or not scales.is_contiguous():
        return None
    target, row_bits = _target(N, K)
    digits = places.digits(places.places(rows.codes, (K, N)), target[::-1])
    if digits is None:
        return None
    strides = [1, N, 1, N, 1, run, *here]
    if zeros is None:
        zero = [CONSTANT, 2 ** (rows.bits - 1), 4, 0, 0, -1]
    else:
        zeros = zeros.contiguous()
    meaning = (scales, zeros, None, None, table, strides, zero, False, 1.0)
    return Packed(words.contiguous(), (*meaning, N, K), rows.bits, digits, row_bits)


def _target(N: int, K: int) -> tuple[tuple[tuple[places.Place, ...], ...], int]:
    """Rows of codes whose distance is a power of two, so that a place tells its row and column."""
    row_bits = max(K - 1, WORD_BITS // 2 - 1).bit_length()  # at least a word of the narrowest codes
    return places.strided((N, K), (1 << row_bits, 1)), row_bits


def zero_rule(zeros: ZeroPoints, bits: int) -> list[int]:
    """[kind, constant, bits, added to a word, added to a field, mask] of stored zero points."""
    ones = 2**bits - 1
    if isinstance(zeros, Stored):
        return _stored(bits)
    if isinstance(zeros, StoredMinusOne):
        return [WORDS, 0, bits, _ONES[bits], 0, ones] if bits in _ONES else [WORDS, 0, bits, 0, 1, ones]
    if isinstance(zeros, StoredMinusOnePerField):
        return [WORDS, 0, bits, 0, 1, ones]
    assert isinstance(zeros, StoredMinusOneUnmasked)
    return [WORDS, 0, bits, 0, 1, -1]


def _stored(bits: int) -> list[int]:
    return [WORDS, 0, bits, 0, 0, -1]


def columns_in(order: Order) -> int:
    """Where the bits of a column's number go in a row that an order permutes within 64 columns."""
    moved, bit = 0, 0
    for size, stride in places.places(order, (1, 64))[1]:
        for level in range(size.bit_length() - 1):
            moved |= ((stride << level).bit_length() - 1) << (4 * bit)
            bit += 1
    return moved
