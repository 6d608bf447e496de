"""Weights on a CUDA device, dequantized in one pass from their stored words, scales and zero points."""

from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qload.devices.cuda import (
    CONSTANT,
    IN_ORDER,
    NO_ZEROS,
    NUMBERS,
    RUN,
    WORDS,
    distance_of_rows,
    in_rows,
    module_for,
    stream,
)
from qload.devices.operands import Stored, StoredCodes, StoredRows, StoredSparse, StoredStreams, StoredTable
from qload.devices.tensors import FLOATS, address
from qload.sentences import WORD_BITS, AxisDigit, Sentence, WordSentence
from qload.sentences.strided_digits import axis_digits, holds_whole_codes, to_strided

UNSIGNED, SIGNED, LOOKED, PAIRS, PAIRS_TURNED, HALVES, SPARSE = range(7)  # how codes lie, see rows.cuh
INTEGERS, E4M3, E5M2, E2M1, SIGNED4 = range(5)  # what they are, see meaning.h
E8M0 = 3  # a type of scales after those of `FLOATS`
FOUR_BITS = {"e2m1": E2M1, "int4": SIGNED4}
BYTES = {
    torch.uint8: (UNSIGNED, INTEGERS),
    torch.int8: (SIGNED, INTEGERS),
    torch.float8_e4m3fn: (LOOKED, E4M3),
    torch.float8_e5m2: (LOOKED, E5M2),
}
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
WIDE = 3  # bits of codes that cross words; all others are read by words
STREAM = "(kp i) n -> (kp w) n (i)"


def dequantize_byte_rows(
    cuda: ModuleType, stored: StoredRows, out: Tensor, start: int, factors: Tensor | None, stream: int
) -> bool:
    """Dequantize outputs from `start` on, times factors (K,) in float32; False without a write."""
    found = _row_source(stored)
    scales, across = stored.scales, 2 if stored.across else 1
    if found is None or stored.codes.stride(1) != 1 or start % across or not _starts(stored, start):
        return False
    (source, values), codes = found, stored.codes[start // across :]
    made, zeros = _rows_meaning(cuda, scales, stored.zeros, stored.n_run, stored.k_run, start)
    made.values, made.divide, made.factors = values, stored.divide, address(factors)
    return _run_rows(cuda, source, (codes, None), made, zeros, out, stream)


def dequantize_sparse(cuda: ModuleType, stored: StoredSparse, kept: Tensor, out: Tensor, stream: int) -> bool:
    """Dequantize a weight with two of every four codes in `kept` (N, K / 4), two a byte."""
    places = stored.places().contiguous().view(torch.uint8)
    made, zeros = _rows_meaning(cuda, stored.scales, None, 1, stored.run, 0)
    made.zeros_kind, made.zero = CONSTANT, 8
    return _run_rows(cuda, SPARSE, (kept, places), made, zeros, out, stream)


def _row_source(stored: StoredRows) -> tuple[int, int] | None:
    if stored.four_bits is None:
        return BYTES.get(stored.codes.dtype)
    return HALVES if stored.across else PAIRS, FOUR_BITS[stored.four_bits]


def _starts(stored: StoredRows, start: int) -> bool:
    """Return whether output `start` begins a row of scales and zero points."""
    return stored.scales.shape[0] == 1 or start % stored.n_run == 0


def _rows_meaning(
    cuda: Any, scales: Tensor, zeros: Tensor | None, n_run: int, k_run: int, start: int
) -> tuple[Any, Tensor | None]:
    """Arguments for the module's `Meaning` from output `start` on, and a tensor to keep alive."""
    made, first = cuda.Meaning(), 0 if scales.shape[0] == 1 else start // n_run
    scales = scales[first:]
    made.scales, made.scale_type = address(scales), _scale_type(scales)
    made.scale_n, made.scale_k = _table_strides(scales)
    made.scale_places = made.zero_places = IN_ORDER
    made.zeros_kind, made.zero, made.zeros, made.zero_n, made.zero_k = NO_ZEROS, 0, 0, 0, 0
    made.zero_bits, made.zero_word, made.zero_add, made.zero_mask = 4, 0, 0, -1
    made.n_table = made.k_table = made.lookup = made.values = made.factors = 0
    made.n_run, made.k_run, made.divide, made.factor = n_run, k_run, False, 1.0
    if zeros is not None:
        zeros = zeros[first:].to(torch.int32)
        made.zeros_kind, made.zeros = NUMBERS, address(zeros)
        made.zero_n, made.zero_k = _table_strides(zeros)
    return made, zeros


def _scale_type(scales: Tensor) -> int:
    return E8M0 if scales.dtype in EXPONENTS else FLOATS.index(scales.dtype)


def _table_strides(table: Tensor) -> tuple[int, int]:
    """Strides of rows and columns, 0 for an axis of size 1."""
    rows, columns = (0 if size == 1 else step for size, step in zip(table.shape, table.stride(), strict=True))
    return rows, columns


def _run_rows(
    cuda: Any,
    source: int,
    read: tuple[Tensor, Tensor | None],
    made: Any,
    kept: object,
    out: Tensor,
    stream: int,
) -> bool:
    codes, places = read
    apart = 0 if places is None else places.stride(0)
    at = *out.shape, FLOATS.index(out.dtype), out.data_ptr(), stream
    with torch.cuda.device(out.device):
        done = cuda.dequantize_rows(
            source, codes.data_ptr(), codes.stride(0), address(places), apart, made, *at
        )
    del kept  # what the kernel reads lived until its launch
    return bool(done)


def runs_down(packing: WordSentence) -> bool:
    """Return whether codes of 3 bits run down each column without gaps."""
    if packing.bits != WIDE or packing.pattern != STREAM:
        return False
    places = [(field.word * WORD_BITS + field.bit, field.code * WIDE + field.low) for field in packing.fields]
    return all(here == there for here, there in places)


def dequantize_three_bits(cuda: ModuleType, stored: StoredCodes, out: Tensor, stream: int) -> bool:
    """Dequantize all outputs of codes of 3 bits; False, without a write, for any other packing."""
    codes, rule, zeros = stored.codes, stored.zero_rule, stored.zeros
    if not (codes.turned and codes.order is None and runs_down(codes.packing)):
        return False
    if rule is None or zeros is None or rule.add_to_word or zeros.stride(1) != 1:
        return False
    if stored.scale_order is not None or stored.zero_order is not None:
        return False
    words, scales = codes.words.contiguous(), stored.scales
    tables = 0, 0, address(stored.k_group)
    with torch.cuda.device(out.device):
        return bool(
            cuda.dequantize_streams(
                words.data_ptr(), words.shape[0], WIDE, stored.run, tables, 0,
                (address(scales), FLOATS.index(scales.dtype), *scales.stride()), (0, 0),
                (address(zeros), zeros.stride(0), rule.add, rule.mask),
                *out.shape, FLOATS.index(out.dtype), out.data_ptr(), stream,
            )
        )  # fmt: skip


def dequantize_bit_streams(cuda: ModuleType, stored: StoredStreams, out: Tensor, stream: int) -> bool:
    """All outputs of groups of their own widths each; False: nothing was done."""
    starts, widths, groups, order = stored.rows().unbind(0)
    words, squares, units = (each.contiguous() for each in (stored.words, stored.squares, stored.units))
    with torch.cuda.device(out.device):
        return bool(
            cuda.dequantize_streams(
                words.data_ptr(), words.shape[0], 0, 1, tuple(map(address, (starts, widths, groups))),
                address(order), (0, 0, 0, 0), (address(squares), address(units)), (0, 0, 0, -1),
                *out.shape, FLOATS.index(out.dtype), out.data_ptr(), stream,
            )
        )  # fmt: skip


def dequantize_stored(stored: Stored, out: Tensor, start: int = 0, factors: Tensor | None = None) -> bool:
    """Dequantize the outputs from `start` on to `out` (rows, K); False without a write.

    `factors`: (K,), by which inputs are multiplied in float32 before they are rounded.
    """
    if out.dtype not in FLOATS or not out.is_contiguous():
        return False
    if isinstance(stored, StoredRows):
        return _rows(stored, out, start, None if factors is None else factors.float().contiguous())
    if factors is not None:
        return False
    if isinstance(stored, StoredSparse):
        return start == 0 and _sparse(stored, out)
    if isinstance(stored, StoredStreams):
        return start == 0 and _streams(stored, out)
    if isinstance(stored, StoredTable):
        return start == 0 and _table(stored, out)
    return _words(stored, out, start)


def _words(stored: StoredCodes, out: Tensor, start: int) -> bool:
    codes, scales, (rows, K) = stored.codes, stored.scales, out.shape
    packing, tensors = codes.packing, [codes.words, scales, stored.zeros, stored.offsets, stored.k_group, out]
    cuda, bits = module_for(*(tensor for tensor in tensors if tensor is not None)), packing.bits
    if cuda is not None and start == 0 and not holds_whole_codes(packing) and rows == codes.shape[0]:
        return dequantize_three_bits(cuda, stored, out, stream(out))
    if cuda is None or not holds_whole_codes(packing) or K % (WORD_BITS // bits):
        return False
    axes = axis_digits(packing.codes, packing.shape_of_codes(codes.words.shape))
    (*inner, outer), across = axes[::-1] if codes.turned else axes
    each, row_bits = prod(digit.size for digit in inner), distance_of_rows(K)
    if start % each or (stored.zero_rule is not None and start * bits % WORD_BITS):
        return False
    outputs = [*inner, AxisDigit(-(-rows // each), outer.stride)]
    digits = [(*digit, 0) for digit in to_strided((1 << row_bits, 1), outputs, across)]
    words = codes.words.contiguous().view(-1)[start // each * outer.stride * bits // WORD_BITS :]
    meaning, kept = _words_meaning(cuda, stored, bits, start)
    with torch.cuda.device(out.device):
        at = words.data_ptr(), rows, K, FLOATS.index(out.dtype), out.data_ptr(), stream(out)
        done = cuda.dequantize(bits, digits, row_bits, meaning, *at)
    del kept  # what the kernel reads lived until its launch
    return bool(done)


def _words_meaning(cuda: Any, stored: StoredCodes, bits: int, start: int) -> tuple[Any, Any]:
    """Arguments for the module's `Meaning` from output `start` on, and tensors to keep alive."""
    made, scales = cuda.Meaning(), stored.scales[start:]
    made.scales, made.scale_type = address(scales), FLOATS.index(scales.dtype)
    made.scale_n, made.scale_k = scales.stride()
    made.scale_places, made.zero_places = columns_of(stored.scale_order), columns_of(stored.zero_order)
    made.offsets = address(None if stored.offsets is None else stored.offsets[start:])
    made.offset_places = columns_of(stored.offset_order)
    zero, zeros = 2 ** (bits - 1) if stored.zero is None else stored.zero, stored.zeros
    made.zeros_kind, made.zero, made.zeros = CONSTANT, zero, 0
    made.zero_n = made.zero_k = 0
    made.zero_bits, made.zero_word, made.zero_add, made.zero_mask = bits, 0, 0, -1
    if zeros is not None and stored.zero_rule is not None:
        zeros = zeros.contiguous()
        rule, made.zeros_kind, made.zero_n = stored.zero_rule, WORDS, 1
        made.zero_k = zeros.stride(0) * WORD_BITS // bits
        made.zero_word, made.zero_add, made.zero_mask = rule.add_to_word, rule.add, rule.mask
        made.zeros = address(zeros[:, start * bits // WORD_BITS :])
    elif zeros is not None:
        made.zeros_kind, made.zeros = NUMBERS, address(zeros[start:])
        made.zero_n, made.zero_k = zeros.stride()
    made.n_table, made.k_table, made.lookup = 0, address(stored.k_group), 0
    made.n_run, made.k_run, made.divide, made.factor = 1, stored.run, False, 1.0
    return made, (scales, zeros)


def _rows(stored: StoredRows, out: Tensor, start: int, factors: Tensor | None) -> bool:
    tensors = [stored.codes, stored.scales, stored.zeros, factors, out]
    cuda = module_for(*(tensor for tensor in tensors if tensor is not None))
    return cuda is not None and dequantize_byte_rows(cuda, stored, out, start, factors, stream(out))


def _sparse(stored: StoredSparse, out: Tensor) -> bool:
    cuda = module_for(stored.codes.words, stored.scales, out)
    kept = None if cuda is None else in_rows(stored.codes)
    if cuda is None or kept is None or kept.shape[0] != out.shape[0]:
        return False
    return dequantize_sparse(cuda, stored, kept, out, stream(out))


def _streams(stored: StoredStreams, out: Tensor) -> bool:
    cuda = module_for(stored.words, stored.squares, stored.units, out)
    if cuda is None or out.shape[0] != stored.words.shape[1]:
        return False
    return dequantize_bit_streams(cuda, stored, out, stream(out))


def _table(stored: StoredTable, out: Tensor) -> bool:
    codes, size = stored.codes.contiguous(), stored.blocksize
    tensors = codes, stored.table, stored.scales
    cuda = module_for(*tensors, out)
    if cuda is None or size < 8 or size & (size - 1) or codes.data_ptr() % 4 or out.data_ptr() % RUN:
        return False
    if stored.table.numel() != 16 or not all(tensor.is_contiguous() for tensor in tensors):
        return False
    if 2 * codes.numel() < out.numel() or stored.scales.numel() * size < out.numel():
        return False
    blocks = address(codes), address(stored.table), address(stored.scales), size.bit_length() - 1
    with torch.cuda.device(out.device):
        at = *out.shape, FLOATS.index(out.dtype), out.data_ptr(), stream(out)
        cuda.dequantize_table(*blocks, *at)
    return True


def columns_of(order: Sentence | None) -> int:
    """Target of each bit of a column's number, in a row that an order permutes within 64 columns."""
    if order is None:
        return IN_ORDER
    moved, bit = 0, 0
    for size, stride in axis_digits(order, (1, 64))[1]:
        for level in range(size.bit_length() - 1):
            moved |= ((stride << level).bit_length() - 1) << (4 * bit)
            bit += 1
    return moved
