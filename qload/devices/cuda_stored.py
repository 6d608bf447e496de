"""Weights on a CUDA device, dequantized in one pass from the words, scales and zero points that they hold."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from qload.devices import cuda_rows, cuda_streams
from qload.devices.cuda import (
    CONSTANT,
    IN_ORDER,
    NUMBERS,
    RUN,
    WORDS,
    distance_of_rows,
    in_rows,
    module_for,
)
from qload.devices.cuda_current import stream
from qload.devices.operands import Stored, StoredCodes, StoredRows, StoredSparse, StoredStreams, StoredTable
from qload.devices.tensors import FLOATS, address
from qload.sentences import WORD_BITS, AxisDigit, Sentence
from qload.sentences.strided_digits import axis_digits, holds_whole_codes, to_strided


def dequantize_stored(stored: Stored, out: Tensor, start: int = 0, factors: Tensor | None = None) -> bool:
    """The outputs from `start` on, as many as `out` (rows, K) has; False where nothing was done.

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
    packing, tensors = codes.packing, [codes.words, scales, stored.zeros, stored.k_group, out]
    cuda, bits = module_for(*(tensor for tensor in tensors if tensor is not None)), packing.bits
    if cuda is not None and start == 0 and not holds_whole_codes(packing) and rows == codes.shape[0]:
        return cuda_streams.three_bits(cuda, stored, out, stream(out))
    if cuda is None or not holds_whole_codes(packing) or K % (WORD_BITS // bits):
        return False
    axes = axis_digits(packing.codes, packing.shape_of_codes(codes.words.shape))
    (*inner, outer), across = axes[::-1] if codes.turned else axes
    each, row_bits = prod(digit.size for digit in inner), distance_of_rows(K)
    if start % each:
        return False
    outputs = [*inner, AxisDigit(-(-rows // each), outer.stride)]
    digits = [(*digit, 0) for digit in to_strided((1 << row_bits, 1), outputs, across)]
    words = codes.words.contiguous().view(-1)[start // each * outer.stride * bits // WORD_BITS :]
    meaning, kept = _meaning(cuda, stored, bits, start)
    with torch.cuda.device(out.device):
        at = words.data_ptr(), rows, K, FLOATS.index(out.dtype), out.data_ptr(), stream(out)
        done = cuda.dequantize(bits, digits, row_bits, meaning, *at)
    del kept  # what the kernel reads lived until its launch
    return bool(done)


def _meaning(cuda: Any, stored: StoredCodes, bits: int, start: int) -> tuple[Any, Any]:
    """What the module calls a meaning, of outputs from `start` on, and what has to live until it was read."""
    made, scales = cuda.Meaning(), stored.scales[start:]
    made.scales, made.scale_type = address(scales), FLOATS.index(scales.dtype)
    made.scale_n, made.scale_k = scales.stride()
    made.scale_places, made.zero_places = columns_of(stored.scale_order), columns_of(stored.zero_order)
    made.zeros_kind, made.zero, made.zeros, zeros = CONSTANT, 2 ** (bits - 1), 0, stored.zeros
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
    return cuda is not None and cuda_rows.rows(cuda, stored, out, start, factors, stream(out))


def _sparse(stored: StoredSparse, out: Tensor) -> bool:
    cuda = module_for(stored.codes.words, stored.scales, out)
    kept = None if cuda is None else in_rows(stored.codes)
    if cuda is None or kept is None or kept.shape[0] != out.shape[0]:
        return False
    return cuda_rows.sparse(cuda, stored, kept, out, stream(out))


def _streams(stored: StoredStreams, out: Tensor) -> bool:
    cuda = module_for(stored.words, stored.squares, stored.units, out)
    if cuda is None or out.shape[0] != stored.words.shape[1]:
        return False
    return cuda_streams.streams(cuda, stored, out, stream(out))


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
    """Where the bits of a column's number go in a row that an order permutes within 64 columns."""
    if order is None:
        return IN_ORDER
    moved, bit = 0, 0
    for size, stride in axis_digits(order, (1, 64))[1]:
        for level in range(size.bit_length() - 1):
            moved |= ((stride << level).bit_length() - 1) << (4 * bit)
            bit += 1
    return moved
