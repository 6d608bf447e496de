"""What typed weights mean, computed on a CUDA device in one pass and rounded once.

A weight whose codes lie in words that a plan moves is read as it is stored; any other through its codes.
"""

from typing import Any

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels.cuda.library import operator
from qload.kernels.cuda.module import FLOATS, check, native, pointer, stream
from qload.kernels.cuda.stored import PLAIN, Packed, of_codes, packed, table
from qload.native.cuda import CODES
from qload.spec import Weight

_MEANING = (
    "Tensor scales, Tensor? zeros, Tensor? lookup, Tensor? n_table, Tensor? k_table, "
    "int[] strides, int[] zero, bool divide, float factor, int N, int K, ScalarType dtype"
)


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """(N, K) in a dtype: `weight.dequantize()` rounded once; the weight lies on a CUDA device."""
    if type(weight).dequantize is not Weight.dequantize:  # more than its codes say
        return weight.dequantize(dtype)
    made = _as_stored(weight, dtype)
    if made is not None:
        return made
    single = of_codes(weight.codes())
    numbers: Tensor = torch.ops.qload.dequantize_single(single.codes, *single.meaning, dtype)
    return numbers


def as_stored(weight: Weight, dtype: torch.dtype, out: Tensor | None) -> Tensor | None:
    """The same of a weight whose words are read as they lie, or None; `out`: a tensor to write to."""
    if out is None:
        return _as_stored(weight, dtype) if dtype in FLOATS else None
    if out.dtype not in FLOATS or not out.is_contiguous() or out.device != weight.device:
        return None
    made = _as_stored(weight, out.dtype, out)
    return None if made is None else out


def _as_stored(weight: Weight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor | None:
    flat = table(weight)
    if flat is not None:
        N, K = weight.shape
        given = (flat.codes, flat.table, flat.scales, flat.block_bits, N, K, dtype)
        made: Tensor = torch.ops.qload.dequantize_table(*given) if out is None else _table(*given, out=out)
        return made
    found = packed(weight)
    return None if found is None else of_words(found, dtype, out)


def of_words(found: Packed, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """(N, K) in a dtype, of codes in words that a plan moves."""
    digits = [stride for digit in found.digits for stride in digit]
    read = found.codes, *found.meaning, dtype, found.bits, digits, found.row_bits
    words: Tensor = torch.ops.qload.dequantize(*read) if out is None else _packed(*read, out=out)
    return words


def _meaning(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    lookup: Tensor | None,
    n_table: Tensor | None,
    k_table: Tensor | None,
    strides: list[int],
    zero: list[int],
    divide: bool,
    factor: float,
) -> Any:
    if scales.dtype not in FLOATS or scales.device != codes.device:
        raise ArgumentError("scales", f"float16, bfloat16 or float32 on {codes.device}", str(scales.dtype))
    if zeros is not None and (zeros.dtype != torch.int32 or zeros.device != codes.device):
        raise ArgumentError("zeros", f"int32 on {codes.device}", str(zeros.dtype))
    check("lookup", lookup, codes, torch.float32)
    check("n_table", n_table, codes, torch.int32)
    check("k_table", k_table, codes, torch.int32)
    meaning = native().Meaning()
    meaning.scales, meaning.scale_type = pointer(scales), FLOATS.index(scales.dtype)
    meaning.lookup, meaning.zeros = pointer(lookup), pointer(zeros)
    meaning.n_table, meaning.k_table = pointer(n_table), pointer(k_table)
    meaning.scale_n, meaning.scale_k, meaning.zero_n, meaning.zero_k, meaning.n_run, meaning.k_run = strides[
        :6
    ]
    meaning.scale_places, meaning.zero_places = strides[6:] or (PLAIN, PLAIN)
    kind, constant, bits, word, add, mask = zero
    meaning.zeros_kind, meaning.zero, meaning.zero_bits = kind, constant, bits
    meaning.zero_word, meaning.zero_add, meaning.zero_mask = word, add, mask
    meaning.divide, meaning.factor = divide, factor
    return meaning


def _packed(codes: Tensor, *rest: Any, out: Tensor | None = None) -> Tensor:
    *meaning, N, K, dtype, bits, digits, row_bits = rest
    check("codes", codes, codes)
    out = codes.new_empty((N, K), dtype=dtype) if out is None else out
    quads = [tuple(digits[i : i + 4]) for i in range(0, len(digits), 4)]
    with torch.cuda.device(codes.device):
        done = native().dequantize(
            bits,
            quads,
            row_bits,
            _meaning(codes, *meaning),
            pointer(codes),
            N,
            K,
            FLOATS.index(dtype),
            pointer(out),
            stream(out),
        )
    if not done:
        raise ArgumentError("digits", "an order of words of 32 bits, below 2**32 words", str(quads))
    return out


def _table(
    codes: Tensor,
    table: Tensor,
    scales: Tensor,
    block_bits: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    check("codes", codes, codes, torch.uint8)
    check("table", table, codes, torch.float32)
    check("scales", scales, codes, torch.float32)
    if 2 * codes.numel() < N * K or (scales.numel() << block_bits) < N * K or block_bits < 3:
        raise ArgumentError("codes", f"{N * K} codes in blocks that have scales", str(tuple(codes.shape)))
    if table.numel() != 16 or codes.data_ptr() % 4:
        raise ArgumentError(
            "table", "16 values, and codes that start at a whole word", str(tuple(table.shape))
        )
    out = codes.new_empty((N, K), dtype=dtype) if out is None else out
    if out.data_ptr() % 16:
        return out.copy_(_table(codes, table, scales, block_bits, N, K, dtype))
    at = pointer(codes), pointer(table), pointer(scales), block_bits, N, K, FLOATS.index(dtype), pointer(out)
    with torch.cuda.device(codes.device):
        native().dequantize_table(*at, stream(out))
    return out


def _single(codes: Tensor, *rest: Any) -> Tensor:
    *meaning, N, K, dtype = rest
    out = codes.new_empty((N, K), dtype=dtype)
    with torch.cuda.device(codes.device):
        native().dequantize_single(
            CODES[codes.dtype],
            *codes.stride(),
            _meaning(codes, *meaning),
            pointer(codes),
            N,
            K,
            FLOATS.index(dtype),
            pointer(out),
            stream(out),
        )
    return out


def _fake(codes: Tensor, *rest: Any) -> Tensor:
    N, K, dtype = rest[9:12]
    return codes.new_empty((N, K), dtype=dtype)


def _table_fake(codes: Tensor, *rest: Any) -> Tensor:
    N, K, dtype = rest[3:6]
    return codes.new_empty((N, K), dtype=dtype)


operator(
    "dequantize",
    f"(Tensor codes, {_MEANING}, int bits, int[] digits, int row_bits) -> Tensor",
    _packed,
    _fake,
)
operator("dequantize_single", f"(Tensor codes, {_MEANING}) -> Tensor", _single, _fake)
operator(
    "dequantize_table",
    "(Tensor codes, Tensor table, Tensor scales, int block_bits, int N, int K, ScalarType dtype) -> Tensor",
    _table,
    _table_fake,
)
