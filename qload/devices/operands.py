"""What is dequantized: codes with their values spelled out, or as a weight stores them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qload.devices.codes import CodesInWords, LazyCodes
from qload.devices.meaning import Meaning, ZeroRule, group_runs
from qload.sentences import Sentence


@dataclass(frozen=True)
class CodeValues:
    """w = (code - zero) * scale[n_group, k_group] * factor, with the codes; see `qload.Codes`."""

    bits: int
    codes: Tensor | LazyCodes
    scales: Tensor
    zeros: Tensor | None
    k_group: Tensor | None
    lookup: Tensor | None = None
    n_group: Tensor | None = None
    divide: bool = False
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class StoredCodes:
    """Codes, scales and zero points as a weight holds them, for a device that reads them where they lie.

    codes        (N, K) in words
    scales       (N, G), of any strides; float16, bfloat16 or float32
    zeros        with a `zero_rule` int32 words (G, N * bits / 32) packed along N; without one int32 numbers
                 (N, G), of any strides; None: all are 2**(bits - 1)
    scale_order, zero_order
                 in which columns of 64 lie; None: in order
    k_group      (K,) int32, the group of each input; None: `run` inputs a group
    """

    codes: CodesInWords
    scales: Tensor
    zeros: Tensor | None
    zero_rule: ZeroRule | None
    run: int
    k_group: Tensor | None = None
    scale_order: Sentence | None = None
    zero_order: Sentence | None = None


@dataclass(frozen=True, eq=False)
class StoredTable:
    """Codes (N, K) of a table of 16 values, flat, two a byte, high bits first; a scale for each block."""

    codes: Tensor
    table: Tensor
    scales: Tensor
    blocksize: int


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Codes in bytes, row by row, as a weight holds them, for a device that reads them where they lie.

    codes        a byte each (N, K): uint8 and int8 are numbers, float8_e4m3fn and float8_e5m2 themselves
    scales       (ceil(N / n_run), ceil(K / k_run)) or one for all, of any strides; float16, bfloat16,
                 float32, or exponents (e8m0) as uint8 or float8_e8m0fnu
    n_run, k_run
                 how many outputs and inputs share a scale
    zeros        numbers, shaped like the scales; None: all are 0
    divide       by the scale
    factor       of all scales
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
    factor: float = 1.0
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
    """Codes that run down columns of words, groups of their own widths, zero points half of what these hold.

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
    """None where scales lie in a way that only torch reads."""
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
    """Whether an index has a group for each of so many; on a device nobody looks at its values."""
    if group is None or (group.numel() == count and (group.is_cuda or not count)):
        return True
    low, high = (int(end) for end in group.aminmax()) if group.numel() else (-1, -1)
    return group.numel() == count and low >= 0 and high < groups
