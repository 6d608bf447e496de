"""What typed weights mean, computed on a CUDA device in one pass and rounded once.

A weight whose codes lie in words that a plan moves is read as it is stored; any other through its codes.
"""

from typing import Any

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels.cuda.library import operator
from qload.kernels.cuda.module import FLOATS, check, native, pointer, stream
from qload.kernels.cuda.stored import PLAIN, Packed, of_codes, packed
from qload.spec import Weight

CODES = {torch.uint8: 1, torch.int8: -1, torch.int16: -2, torch.int32: -4, torch.int64: -8, torch.bool: 1}

_MEANING = (
    "Tensor scales, Tensor? zeros, Tensor? lookup, Tensor? n_table, Tensor? k_table, "
    "int[] strides, int[] zero, bool divide, float factor, int N, int K, ScalarType dtype"
)


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """(N, K) in a dtype: `weight.dequantize()` rounded once; the weight lies on a CUDA device."""
    if type(weight).dequantize is not Weight.dequantize:  # more than its codes say
        return weight.dequantize().to(dtype)
    found: Packed | None = packed(weight)
    if found is None:
        single = of_codes(weight.codes())
        made: Tensor = torch.ops.qload.dequantize_single(single.codes, *single.meaning, dtype)
        return made
    flat = [stride for digit in found.digits for stride in digit]
    words: Tensor = torch.ops.qload.dequantize(
        found.codes, *found.meaning, dtype, found.bits, flat, found.row_bits, found.high_first
    )
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


def _packed(codes: Tensor, *rest: Any) -> Tensor:
    *meaning, N, K, dtype, bits, digits, row_bits, high_first = rest
    check("codes", codes, codes)
    out = codes.new_empty((N, K), dtype=dtype)
    quads = [tuple(digits[i : i + 4]) for i in range(0, len(digits), 4)]
    with torch.cuda.device(codes.device):
        native().dequantize(
            bits,
            quads,
            row_bits,
            high_first,
            _meaning(codes, *meaning),
            pointer(codes),
            N,
            K,
            FLOATS.index(dtype),
            pointer(out),
            stream(out),
        )
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


operator(
    "dequantize",
    f"(Tensor codes, {_MEANING}, int bits, int[] digits, int row_bits, bool high_first) -> Tensor",
    _packed,
    _fake,
)
operator("dequantize_single", f"(Tensor codes, {_MEANING}) -> Tensor", _single, _fake)
