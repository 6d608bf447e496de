"""Weights with codes in rows, for the CPU module: some rows become floats, in the cache alone.

nf4 and fp4, MXFP4 and NVFP4, FP8, 8-bit integers, and packed integers whose words run along the inputs need
no order of their own for that.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from qload.devices.cpu import has_routines
from qload.devices.operands import Meaning, meaning_of
from qload.devices.tensors import dense, is_plain
from qload.formats import (
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackTensorWeight,
    CTPackWeight,
    EETQWeight,
    Fp8Weight,
    ModelOptAWQWeight,
    ModelOptNVFP4Weight,
    MXFP8Weight,
)
from qload.layouts import ClippedCodes, NibblePairs, PackedCodes, eetq
from qload.native import is_on, isa, load, threads
from qload.sentences.strided_digits import stream_axis
from qload.spec import Codes, Weight

BYTE = 8
BYTE_SCALES = (torch.float32, torch.uint8, torch.float8_e4m3fn)  # what scales of rows are: floats, exponents
MOST_COMPARED = 8
MAX_CODES = 1 << 16  # codes of a row: an int32 holds sums of fewer
SIGNED = torch.arange(2**BYTE, dtype=torch.uint8).view(torch.int8).float()  # of each byte
ROW_TYPES: tuple[type[Weight], ...] = (  # formats that store rows, or of which some layers do
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackTensorWeight,
    CTPackWeight,
    EETQWeight,
    Fp8Weight,
    ModelOptAWQWeight,
    ModelOptNVFP4Weight,
    MXFP8Weight,
)


@dataclass(frozen=True)
class CodeRows:
    """Packed codes of each output, one after another: `bytes` uint8 (N, row bytes), rows of any stride.

    `bits` of a code, 2 to 8; `high_first`: of 4 bits, the first of two lies in the high half. Scales of the
    `meaning` are of a type of `BYTE_SCALES`: exponents (e8m0) and e4m3fn are multiplied by `second`, or
    `divided` by it, and rounded once.
    """

    bytes: Tensor
    bits: int
    high_first: bool
    meaning: Meaning
    second: float = 1.0
    divided: bool = False


@dataclass(frozen=True)
class _Kept:
    """Rows of tensors with the addresses `seen`, and copies of the bytes of some, by field number."""

    seen: tuple[tuple[object, ...], ...]
    copies: dict[int, "numpy.ndarray[Any, Any]"]
    rows: CodeRows | None

    def stands_for(self, tensors: list[Tensor]) -> bool:
        return all(numpy.array_equal(_raw(tensors[at]).numpy(), copy) for at, copy in self.copies.items())


class KeptRows:
    """Result of `rows_of` for a layer's weight, between calls.

    Codes, and what else a product reads as it is stored, are read where they lie. Of each tensor that becomes
    another, as scales do, a copy is kept too and compared before each use, so that a write is seen whoever
    makes it. Where these are more than a part in `MOST_COMPARED` of the weight, nothing is kept.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None  # replaced as a whole: threads may share a layer

    def of(self, weight: Weight) -> CodeRows | None:
        """`rows_of` a weight, from an earlier call if nothing was written since."""
        tensors = [tensor.detach() for tensor in weight.fields().values()]
        seen = tuple((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in tensors)
        kept = self._kept
        if kept is not None and kept.seen == seen and kept.stands_for(tensors):
            return kept.rows
        rows = rows_of(weight)
        read = [] if rows is None else [rows.bytes, *rows.meaning.tensors()]
        others = [at for at, tensor in enumerate(tensors) if not any(_lies_in(tensor, each) for each in read)]
        compared, stored = sum(tensors[at].nbytes for at in others), sum(each.nbytes for each in tensors)
        whole = all(tensors[at].is_contiguous() for at in others)
        keeps = rows is not None and whole and compared * MOST_COMPARED <= stored
        self._kept = (
            _Kept(seen, {at: _raw(tensors[at]).clone().numpy() for at in others}, rows) if keeps else None
        )
        return rows


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def _lies_in(tensor: Tensor, other: Tensor) -> bool:
    """Return whether a tensor lies in the memory of another: in a contiguous one, or on the same rows."""
    first, begin = tensor.data_ptr(), other.data_ptr()
    if not other.is_contiguous():  # between whose rows there may be other tensors
        return first == begin and tensor.nbytes == other.nbytes
    return begin <= first and first + tensor.nbytes <= begin + other.nbytes and tensor.nbytes > 0


def rows_of(weight: Weight) -> CodeRows | None:
    """Codes of a matrix in rows, and their meaning; None for any other order."""
    if not isinstance(weight, ROW_TYPES) or weight.input_factors is not None:
        return None
    signed = isinstance(weight, CTIntWeight) and weight.config.bits == BYTE
    codes = weight.signed() if signed else weight.codes()  # type: ignore[attr-defined]
    found = _bytes(codes)
    meaning = None if found is None else meaning_of(codes)
    if found is None or meaning is None or not all(each.is_contiguous() for each in meaning.tensors()):
        return None
    if signed and meaning.zeros is not None and not meaning.zeros.any():
        meaning = replace(meaning, zeros=None)
    if isinstance(codes.codes, Tensor) and codes.codes.dtype == torch.int8:
        if meaning.lookup is not None:
            return None
        meaning = replace(meaning, lookup=SIGNED)
    elif isinstance(codes.codes, Tensor) and meaning.lookup is not None:
        meaning = replace(meaning, lookup=_of_each_byte(meaning.lookup))
    high_first = isinstance(codes.codes, NibblePairs) and codes.codes.high_first
    bits = BYTE if isinstance(codes.codes, Tensor) else codes.bits
    made = _with_stored_scales(CodeRows(found, bits, high_first, meaning), weight)
    return made if has_routines(found, *meaning.tensors()) else None


def _with_stored_scales(rows: CodeRows, weight: Weight) -> CodeRows:
    """Rows with the stored scales, if these are bytes."""
    scales, second, divided = None, 1.0, False
    if isinstance(weight, CTMXFP4Weight | MXFP8Weight):
        scales = weight.exponents
    elif isinstance(weight, CTNVFP4Weight | ModelOptNVFP4Weight):
        divided = isinstance(weight, CTNVFP4Weight)
        both = weight.weight_global_scale if isinstance(weight, CTNVFP4Weight) else weight.weight_scale_2
        if both.numel() == 1:
            scales, second = weight.weight_scale, float(both)
    whole = scales is not None and scales.is_contiguous() and scales.shape == rows.meaning.scales.shape
    if not whole or scales is None or rows.meaning.n_group is not None:
        return rows
    return replace(rows, meaning=replace(rows.meaning, scales=scales), second=second, divided=divided)


def _of_each_byte(lookup: Tensor) -> Tensor:
    """Extend a lookup table to 256 values, with NaN, for narrower codes of a byte each."""
    return torch.nn.functional.pad(lookup, (0, 2**BYTE - len(lookup)), value=torch.nan)


def _bytes(codes: Codes) -> Tensor | None:
    """Codes as rows of bytes; None for any other order."""
    held = codes.codes
    if isinstance(held, Tensor):
        plain = held.dtype in (torch.uint8, torch.int8) and held.ndim == 2 and held.stride(1) == 1
        return held.view(torch.uint8) if plain else None
    if isinstance(held, NibblePairs):
        return held.bytes if held.bytes.stride(1) == 1 else None
    packed = held.packed if isinstance(held, ClippedCodes) else held
    if not isinstance(packed, PackedCodes) or packed.order is not None or packed.turned:
        return None
    return dense(packed.words).view(torch.uint8) if stream_axis(packed.packing) == 1 else None


def rows_of_pairs(weight: EETQWeight) -> CodeRows:
    """The bytes of contiguous codes as rows (N / 2, 2 K), less 128, without scales."""
    K, N = weight.weight.shape
    zeros = torch.full((1, 1), 2.0 ** (BYTE - 1))
    meaning = Meaning(torch.ones(1, 1), zeros, None, None, None, 2 * K, False, 1.0)
    return CodeRows(weight.weight.view(torch.uint8).view(N // 2, 2 * K), BYTE, False, meaning)


def inputs_of_pairs(x: Tensor) -> Tensor:
    """Tokens (M, K) of any type -> (2 M, 2 K), float32: of output 2i of all pairs, then of output 2i + 1."""
    M, K = x.shape
    both = torch.zeros(2, M, K // eetq.TILE, 2, eetq.TILE)
    lying = x.view(M, K // eetq.TILE, 4, 2, 4, 2).permute(0, 1, 2, 4, 5, 3)
    for u in range(2):
        both[u, :, :, u].view(lying.shape).copy_(lying)
    return both.view(2 * M, 2 * K)


def outputs_of_pairs(sums: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Float32 (2 M, N / 2) -> (M, N), scaled, plus a float32 bias, rounded once to a dtype."""
    M, pairs = sums.shape[0] // 2, sums.shape[1]
    y = sums.view(2, M, pairs).permute(1, 2, 0).reshape(M, 2 * pairs) * scales.float()
    return (y if bias is None else y.add_(bias)).to(dtype)


def sums_of_codes(x: Tensor, codes: Tensor) -> Tensor | None:
    """Inputs (M, K) times the codes of a weight (N, K), int8 both: int32 (M, N).

    None where the module does not take them.
    """
    module = load("cpu").found
    if module is None or not is_on() or torch.compiler.is_compiling():
        return None
    if not (is_plain(x, "cpu") and is_plain(codes, "cpu") and x.dtype == codes.dtype == torch.int8):
        return None
    (M, K), N = x.shape, codes.shape[0]
    if not 0 < K < MAX_CODES or codes.stride(1) != 1:
        return None
    x, sums = x.contiguous(), x.new_empty(M, N, dtype=torch.int32)
    at = codes.data_ptr(), codes.stride(0), sums.data_ptr()
    module.multiply_codes(isa(), (M, K, N), x.data_ptr(), *at, threads())
    return sums
