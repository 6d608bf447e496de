"""The CUDA module's routines on tensors, as `cpu` has them: each says whether it did the work.

All run on the stream that is current on the tensors' device, and none waits for it but `pack`, whose caller
asks which bits the codes had.
"""

from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qload.native.cpu import PACKED, AxisDigit, Digit
from qload.native.held import OUT, Meaning, address, is_plain
from qload.native.modules import load
from qload.native.settings import is_on

WORD_BITS = 32
RUN = 16  # bytes that numbers are read and written by
MOVED = (*PACKED, 16, 32)  # bits of elements that the module moves
CODES = {torch.uint8: 1, torch.int8: -1, torch.int16: -2, torch.int32: -4, torch.int64: -8, torch.bool: 1}
NONE, CONSTANT, WORDS, INT32 = range(4)  # kinds of zero points


def move(
    source: Tensor,
    target: Tensor,
    bits: int,
    digits: Sequence[Digit],
    rows: tuple[Tensor, Sequence[int]] | None = None,
) -> bool:
    """target[digits] = source[digits]; `rows`: where each starts in `source`, and how digits count them."""
    cuda = _module(source, target)
    if cuda is None:
        return False
    if bits == 2 * WORD_BITS:
        bits, digits = WORD_BITS, [Digit(2, 1, 1), *(Digit(size, 2 * a, 2 * b) for size, a, b in digits)]
    if bits not in MOVED or target.data_ptr() % (WORD_BITS // 8):
        return False
    starts, counts = rows or (None, [0] * len(digits))
    quads = [(*digit, count) for digit, count in zip(digits, counts, strict=True)]
    with torch.cuda.device(target.device):
        cuda.move(bits, quads, source.data_ptr(), address(starts), target.data_ptr(), stream(target))
    return True


def pack(
    codes: Tensor, bits: int, rows: Sequence[AxisDigit], columns: Sequence[AxisDigit], words: Tensor
) -> int | None:
    """int32 codes (rows, columns) -> words; all bits that the codes had, or None if nothing was done."""
    if codes.stride(1) != 1:
        codes, rows, columns = codes.T, columns, rows
    (R, C), per_word = codes.shape, WORD_BITS // bits
    cuda = _module(codes, words)
    if cuda is None or bits not in PACKED or C % per_word or not codes.is_contiguous():
        return None
    codes = codes if codes.data_ptr() % RUN == 0 else codes.clone()
    plain, seen = codes.new_empty((R, C // per_word)), codes.new_zeros(1)
    with torch.cuda.device(codes.device):
        cuda.narrow(bits, codes.data_ptr(), plain.numel(), plain.data_ptr(), seen.data_ptr(), stream(codes))
    digits = [Digit(size, there, here) for size, here, there in _digits((C, 1), rows, columns)]
    return int(seen) if move(plain, words, bits, digits) else None


def unpack(
    words: Tensor, bits: int, rows: Sequence[AxisDigit], columns: Sequence[AxisDigit], codes: Tensor
) -> bool:
    """Words -> int32 codes (rows, columns), contiguous."""
    (R, C), per_word = codes.shape, WORD_BITS // bits
    cuda = _module(words, codes)
    if cuda is None or bits not in PACKED or C % per_word or not codes.is_contiguous():
        return False
    if codes.dtype != torch.int32 or codes.data_ptr() % RUN:  # it writes numbers of 32 bits, a run at a time
        return False
    plain = words.new_empty((R, C // per_word))
    if not move(words, plain, bits, _digits((C, 1), rows, columns)):
        return False
    with torch.cuda.device(codes.device):
        cuda.widen(bits, plain.data_ptr(), plain.numel(), codes.data_ptr(), stream(codes))
    return True


def gather(
    source: Tensor,
    bits: int,
    order: Tensor,
    lying: tuple[Sequence[AxisDigit], Sequence[AxisDigit]],
    rows: Sequence[AxisDigit],
    columns: Sequence[AxisDigit],
    words: Tensor,
) -> bool:
    """Packs rows order[0], order[1], ... of codes; `lying`: where their rows and columns are in `source`.

    Words that hold codes of several rows are brought into row-major order first: two passes over memory
    where one would read every word as often as it has codes.
    """
    if bits not in PACKED or _module(source, words, order) is None:
        return False
    length = prod(place.size for place in lying[1])
    if length % (WORD_BITS // bits):
        return False
    plain = source.new_empty(source.shape)
    if not move(source, plain, bits, _digits((length, 1), *lying)):
        return False
    starts, digits, counts, reached = order.long() * length, [], [], 1
    for size, place in rows:
        digits.append(Digit(size, reached * length, place))
        counts.append(reached)
        reached *= size
    across = [Digit(size, there, here) for size, here, there in _digits((1,), columns)]
    return move(plain, words, bits, [*digits, *across], (starts, [*counts, *(0 for _ in across)]))


def dequantize(
    words: Tensor,
    bits: int,
    rows: Sequence[AxisDigit],
    columns: Sequence[AxisDigit],
    meaning: Meaning,
    out: Tensor,
) -> bool:
    """Packed codes -> floats, rows of `out`."""
    cuda = _module(words, out, *meaning.tensors())
    N, K = out.shape
    if cuda is None or bits not in PACKED or not _takes(meaning, out) or K % (WORD_BITS // bits):
        return False
    row_bits = max(K - 1, WORD_BITS // 2 - 1).bit_length()  # at least a word of the narrowest codes
    quads = [(*digit, 0) for digit in _digits((1 << row_bits, 1), rows, columns)]
    meant, kept = _meant(cuda, meaning)
    with torch.cuda.device(out.device):
        at = words.data_ptr(), N, K, OUT[out.dtype], out.data_ptr(), stream(out)
        done = cuda.dequantize(bits, quads, row_bits, meant, *at)
    del kept  # what the kernel reads lived until its launch
    return bool(done)


def dequantize_single(codes: Tensor, meaning: Meaning, out: Tensor) -> bool:
    """Codes as numbers, of any strides -> floats, rows of `out`."""
    cuda = _module(codes, out, *meaning.tensors())
    if cuda is None or codes.dtype not in CODES or not _takes(meaning, out):
        return False
    meant, kept = _meant(cuda, meaning)
    with torch.cuda.device(out.device):
        at = codes.data_ptr(), *out.shape, OUT[out.dtype], out.data_ptr(), stream(out)
        cuda.dequantize_single(CODES[codes.dtype], *codes.stride(), meant, *at)
    del kept
    return True


def _meant(cuda: ModuleType, meaning: Meaning) -> tuple[Any, Tensor | None]:
    """What the module calls a meaning, and what has to live until it was read."""
    made, (tables, groups) = cuda.Meaning(), meaning.scales.shape
    zeros = None if meaning.zeros is None else meaning.zeros.to(torch.int32)
    made.scales, made.scale_type = meaning.scales.data_ptr(), OUT[torch.float32]
    made.scale_n = made.zero_n = 0 if tables == 1 and meaning.n_group is None else groups
    made.scale_k = made.zero_k = 1
    made.lookup, made.zeros = address(meaning.lookup), address(zeros)
    made.zeros_kind = NONE if zeros is None else INT32
    made.n_table, made.k_table = address(meaning.n_group), address(meaning.k_group)
    made.k_run = meaning.run
    made.divide, made.factor = meaning.divide, meaning.factor
    return made, zeros


def _takes(meaning: Meaning, out: Tensor) -> bool:
    whole = all(each.is_contiguous() for each in meaning.tensors())
    return whole and out.dtype in OUT and out.is_contiguous()


def _digits(strides: Sequence[int], *axes: Sequence[AxisDigit]) -> list[Digit]:
    """From the places of each axis to a strided matrix."""
    digits = []
    for stride, axis in zip(strides, axes, strict=True):
        for size, place in axis:
            digits.append(Digit(size, place, stride))
            stride *= size
    return digits


def stream(tensor: Tensor) -> int:
    """The stream that is current on a tensor's device."""
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def has_routines(*tensors: Tensor) -> bool:
    """Whether there is native code for tensors like these."""
    return _module(*tensors) is not None


def _module(*tensors: Tensor) -> ModuleType | None:
    """The CUDA module, where it may touch these tensors, all on one device."""
    found = load("cuda").found
    if found is None or not is_on() or torch.compiler.is_compiling():
        return None
    device = tensors[0].device
    return found if all(is_plain(tensor, "cuda") and tensor.device == device for tensor in tensors) else None
