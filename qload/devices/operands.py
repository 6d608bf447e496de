"""Operands of dequantization: codes with scales and zero points, in words, or as a weight stores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

from qload import dtypes
from qload.dtypes import STORED, DtypeLike
from qload.errors import ArgumentError, check_values
from qload.lazy_torch import Tensor, torch
from qload.sentences import Sentence, WordSentence

INTEGERS = (dtypes.int32, dtypes.uint8, dtypes.int64, dtypes.int16, dtypes.int8)


@dataclass(frozen=True, eq=False)
class Meaning:
    """w[n, k] = (value of code[n, k] - zero) * scale * factor, or by the scale, in this order in float32.

    scales, zeros: float32 (R, G), row n_group[n] or n * R / N, column k_group[k] or k / run. `lookup`: the
    value of each code, float32; None: the code itself. Indices are int32.
    """

    scales: Tensor
    zeros: Tensor | None
    lookup: Tensor | None
    n_group: Tensor | None
    k_group: Tensor | None
    run: int
    divide: bool
    factor: float

    def of_rows(self, rows: slice) -> Meaning:
        """Meaning of some rows."""
        if self.n_group is not None:
            return replace(self, n_group=self.n_group[rows])
        if self.scales.shape[0] == 1:
            return self
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, scales=self.scales[rows], zeros=zeros)

    def tensors(self) -> Sequence[Tensor]:
        """Tensors that a routine reads."""
        every = (self.scales, self.zeros, self.lookup, self.n_group, self.k_group)
        return [tensor for tensor in every if tensor is not None]


@dataclass(frozen=True)
class ZeroRule:
    """Reading of a field of a zero-point word: ((word + add_to_word) >> field) + add, then masked."""

    add_to_word: int = 0
    add: int = 0
    mask: int = -1


def group_runs(group: Tensor | None, K: int) -> tuple[int, Tensor | None]:
    """(rows of a group, None) for equal consecutive groups; else, and on CUDA, (1, group of each row)."""
    if group is None or not group.numel():
        return K, None
    if group.is_cuda:  # whose values would have to be waited for
        return 1, group.to(torch.int32)
    run = run_of(group)
    return (run, None) if run else (1, group.to(torch.int32))


def run_of(group: Tensor) -> int:
    """Rows of a group, for consecutive groups of one size, else 0; waits for a device."""
    if group.is_meta:
        return 0
    run = int((group == 0).sum()) or 1
    return run if bool((group == torch.arange(group.numel(), device=group.device) // run).all()) else 0


@dataclass(frozen=True, eq=False)
class CodesInWords:
    """Codes (R, C) in the words of a packing. `turned`: the words hold (C, R).

    `order`: row i, or column i of turned ones, is row order[i] of what the words hold.
    """

    packing: WordSentence
    words: Tensor
    turned: bool = False
    order: Tensor | None = None

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(R, C)."""
        rows, columns = self.packing.shape_of_codes(self.words.shape)
        rows = rows if self.order is None else self.order.numel()
        return (columns, rows) if self.turned else (rows, columns)


@runtime_checkable
class LazyCodes(Protocol):
    """Integer codes (R, C), still packed."""

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C)."""

    @property
    def T(self) -> Tensor | LazyCodes:
        """(C, R)."""

    def __getitem__(self, rows: Tensor) -> Tensor | LazyCodes:
        """Row i is row rows[i]."""

    def plain(self) -> Tensor:
        """The codes as numbers, int32 or uint8 (R, C)."""

    def values(self, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Values of the codes, see `values`."""

    def dequantize(self, meaning: Meaning, out: Tensor) -> bool:
        """Dequantize in one pass from the words to `out`; False without a write."""


def plain(codes: Tensor | LazyCodes) -> Tensor:
    """Codes as numbers, whether they still lie in words or not."""
    return codes if isinstance(codes, Tensor) else codes.plain()


def values(codes: Tensor | LazyCodes, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows, of about `count` codes, and their values as new float32 (rows, C).

    `lookup`: (2**bits,) what each code stands for; None: itself.
    """
    if not isinstance(codes, Tensor):
        yield from codes.values(lookup, count)
        return
    R, C = codes.shape
    step = max(1, count // max(C, 1))
    for start in range(0, R, step):
        rows = slice(start, min(start + step, R))
        yield rows, stood_for(codes[rows], lookup)


def stood_for(codes: Tensor, lookup: Tensor | None) -> Tensor:
    """Values of codes, new float32."""
    if lookup is None:
        return codes.to(torch.float32, memory_format=torch.contiguous_format)
    return lookup.gather(0, codes.flatten().long()).view(codes.shape)


def check_integers(codes: Tensor) -> None:
    """Check that codes are integers with values, of a dtype that torch computes with; ArgumentError."""
    if STORED[codes.dtype] not in INTEGERS:
        known = ", ".join(_word(dtype) for dtype in INTEGERS)
        raise ArgumentError("codes", f"integers: {known}", _word(codes.dtype))
    check_values("codes", codes)


def _word(dtype: DtypeLike) -> str:
    return str(dtype).removeprefix("torch.")


def check_codes(codes: Tensor, bits: int) -> None:
    """Check 0 <= code < 2**bits; ArgumentError with the range of the codes."""
    low, high = map(int, codes.aminmax()) if codes.numel() else (0, 0)
    if low < 0 or high >= 2**bits:
        raise ArgumentError("codes", f"0 <= code < {2**bits}", f"{low} to {high}")


@dataclass(frozen=True, eq=False)
class CodeValues:
    """w = (code - zero) * scale[n_group, k_group] * factor - offset, with factors of rows; see `Codes`.

    `rounding`: dtype that difference, product and result are each rounded to.
    """

    bits: int
    codes: Tensor | LazyCodes
    scales: Tensor
    zeros: Tensor | None
    k_group: Tensor | None
    lookup: Tensor | None = None
    n_group: Tensor | None = None
    divide: bool = False
    factor: float = 1.0
    row_factors: Tensor | None = None
    offsets: Tensor | None = None
    rounding: DtypeLike | None = None


@dataclass(frozen=True, eq=False)
class StoredCodes:
    """Codes, scales and zero points of a weight in their stored order.

    codes        (N, K) in words
    scales       (N, G), of any strides; float16, bfloat16 or float32
    zeros        with a `zero_rule` int32 words (G, N * bits / 32) packed along N; without one int32 numbers
                 (N, G), of any strides; None: all are `zero`, or 2**(bits - 1) where this is None
    scale_order, zero_order, offset_order
                 in which columns of 64 lie; None: in order
    k_group      (K,) int32, the group of each input; None: `run` inputs a group
    offsets      (N, G), of the dtype and strides of the scales, subtracted from products; None: no offsets
    """

    codes: CodesInWords
    scales: Tensor
    zeros: Tensor | None
    zero_rule: ZeroRule | None
    run: int
    k_group: Tensor | None = None
    scale_order: Sentence | None = None
    zero_order: Sentence | None = None
    zero: int | None = None
    offsets: Tensor | None = None
    offset_order: Sentence | None = None


@dataclass(frozen=True, eq=False)
class StoredTable:
    """Codes (N, K) of a table of 16 values, flat, two a byte, high bits first; a scale for each block."""

    codes: Tensor
    table: Tensor
    scales: Tensor
    blocksize: int


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Codes in bytes, row by row, of a weight in its stored order.

    codes        a byte each (N, K): uint8 and int8 are numbers, float8_e4m3fn and float8_e5m2 themselves
    scales       (ceil(N / n_run), ceil(K / k_run)) or one for all, of any strides; float16, bfloat16,
                 float32, or exponents (e8m0) as uint8 or float8_e8m0fnu
    n_run, k_run
                 how many outputs and inputs share a scale
    zeros        numbers, shaped like the scales; None: all are 0
    divide       by the scale
    four_bits    two codes a byte, uint8 (N, K / 2), the first in the low bits: "e2m1", or "int4", which is
                 two's complement; None: a byte each
    across       whether the two of a byte are outputs 2i, in the low bits, and 2i + 1: (N / 2, K)
    """

    codes: Tensor
    scales: Tensor
    n_run: int
    k_run: int
    zeros: Tensor | None = None
    divide: bool = False
    four_bits: Literal["e2m1", "int4"] | None = None
    across: bool = False


@dataclass(frozen=True, eq=False)
class StoredSparse:
    """Codes of four bits, two of every four inputs, all zero points 8; the others mean 0.

    codes        the kept ones (N, K / 2), in words
    places       makes (N, K / 16) int16: of 16 inputs, two bits for each of the eight that are kept, which of
                 its four it is, the first in the low bits
    scales       (N, G), of any strides; float16, bfloat16 or float32
    run          inputs of a group
    """

    codes: CodesInWords
    places: Callable[[], Tensor]
    scales: Tensor
    run: int


@dataclass(frozen=True, eq=False)
class StoredStreams:
    """Codes that run down columns of words; each group has its own width, and zero points of half its range.

    w[n, k] = rounded(scale[g, n] * (code[r, n] - 2**(width[r] - 1))), r = order[k], g the group of row r,
    scale[g, n] = rounded((root[g, n] + 1)**2 * rounded(units[g] / 256)), both rounded to float16

    words        (R, N) int32
    rows         makes (4, K) int32: at which bit of a column row r starts, its width, its group; the order
    squares      (G, N / 8) int32: the roots, four bits each, the first in the low bits
    units        (G,) float16
    """

    words: Tensor
    rows: Callable[[], Tensor]
    squares: Tensor
    units: Tensor


Stored = StoredCodes | StoredTable | StoredRows | StoredSparse | StoredStreams  # as a weight holds it


def meaning_of(codes: CodeValues) -> Meaning | None:
    """Meaning of codes for native code; None for operands that torch alone reads."""
    if codes.row_factors is not None or codes.offsets is not None or codes.rounding is not None:
        return None
    N, K = codes.codes.shape
    scales, zeros, lookup = codes.scales, codes.zeros, codes.lookup
    tables = scales.shape[0] if codes.n_group is None else N
    if scales.ndim != 2 or tables not in (1, N) or (zeros is not None and zeros.shape != scales.shape):
        return None
    if codes.k_group is None and scales.shape[1] != 1:
        return None
    if lookup is not None and (lookup.numel() < 2**codes.bits or lookup.dtype != torch.float32):
        return None
    if not (_fits(codes.k_group, K, scales.shape[1]) and _fits(codes.n_group, N, scales.shape[0])):
        return None
    run, index = group_runs(codes.k_group, max(K, 1))
    return Meaning(
        scales=scales.float().contiguous(),
        zeros=None if zeros is None else zeros.float().contiguous(),
        lookup=None if lookup is None else lookup.contiguous(),
        n_group=None if codes.n_group is None else codes.n_group.to(torch.int32),
        k_group=index,
        run=run,
        divide=codes.divide,
        factor=codes.factor,
    )


def _fits(group: Tensor | None, count: int, groups: int) -> bool:
    """Return whether an index has `count` valid groups; on a device the values are not checked."""
    if group is None or (group.numel() == count and (group.is_cuda or not count)):
        return True
    low, high = (int(end) for end in group.aminmax()) if group.numel() else (-1, -1)
    return group.numel() == count and low >= 0 and high < groups
