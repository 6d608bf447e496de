"""Few tokens through the experts that they chose: a pass over gate and up, one over down, and the sum.

A token's result has the same bits whatever other tokens there are, and however many of them.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from qload.kernels.cuda.experts_call import ExpertMatrix, ExpertsCall
from qload.kernels.cuda.experts_rows import combine, gate_rows, gather_rows
from qload.kernels.cuda.experts_sorted import SortedPairs, sorted_pairs, unsorted
from qload.kernels.cuda.module import native, pointer, stream
from qload.layouts import strips

PAIR = 2 * strips.TILE_N  # columns of gate and up of which each tile has its own
NO_GATE = (-1, 0.0, 0.0)
MOST_OF_EIGHT = 12  # pairs of an expert, on average, up to which eight at once are faster
SHORT = 1024  # rows that four warps would share badly
FILLED = 88  # blocks of two tiles by which a chip is filled: fewer are made of more warps


class ExpertsDivision(NamedTuple):
    """Tiles of 64 columns of a block, and warps that share K. The latter decide the bits of a result."""

    columns: int
    row_warps: int


@cache
def division(N: int, K: int, top: int, gated: bool) -> ExpertsDivision:
    """By the columns that one token asks for and the rows of a warp: no other token changes it."""
    if top * N // PAIR < FILLED:
        return ExpertsDivision(2, 6) if gated else ExpertsDivision(1, 12)
    return ExpertsDivision(2, 4) if gated or K > SHORT else ExpertsDivision(1, 3)


def turn(call: ExpertsCall) -> int:
    """Tokens that a block takes at once: 8, or 16 where it takes longer to read an expert twice."""
    return 8 if call.pairs <= MOST_OF_EIGHT * call.total else 16


def multiply_few(call: ExpertsCall) -> Tensor:
    """y (M, H)."""
    with torch.cuda.device(call.x.device):
        pairs = unsorted(call) if call.tokens == 1 else sorted_pairs(call, turn(call))
        sums = product(call, pairs, call.down, _between(call, pairs), 1, known=True)
        return combine(call, sums)


def _between(call: ExpertsCall, pairs: SortedPairs) -> Tensor:
    """(pairs, I) or as wide as down is padded: the activation of each pair."""
    x, sharing = in_order(call, call.gate_up, call.x, call.top)
    inner = call.down.K
    pitch = inner if call.down.perm is not None else call.down.rows
    factors = call.weights if call.weighs_inputs else None
    if call.gate_up.columns == 2 * inner and inner % strips.TILE_N == 0:
        made = call.x.new_empty if pitch == inner else call.x.new_zeros
        between: Tensor = made((call.pairs, pitch))
        product(call, pairs, call.gate_up, x, sharing, factors, between)
    else:
        between = gate_rows(call, product(call, pairs, call.gate_up, x, sharing, factors), pitch)
    return in_order(call, call.down, between, 1)[0]


def in_order(call: ExpertsCall, matrix: ExpertMatrix, x: Tensor, sharing: int) -> tuple[Tensor, int]:
    """x as the rows of a matrix are ordered and padded, and how many pairs share a row of it."""
    if x.shape[1] == matrix.rows and matrix.perm is None:
        return x, sharing
    return gather_rows(call, matrix, x, sharing, call.pairs), 1


def product(
    call: ExpertsCall,
    pairs: SortedPairs,
    matrix: ExpertMatrix,
    x: Tensor,
    sharing: int,
    factors: Tensor | None = None,
    into: Tensor | None = None,
    known: bool = False,
) -> Tensor:
    """float32 (pairs, N) of a matrix; or gate and up as one, `into` memory that is given.

    `known`: a kernel that waited for the pairs to be sorted ran in between, so that nobody has to again.
    """
    y = x.new_empty((call.pairs, matrix.N), dtype=torch.float32) if into is None else into
    how = division(matrix.columns, matrix.rows, call.top, into is not None)
    read = x, matrix.weights, matrix.scales, matrix.zeros, matrix.bias, factors, y
    sizes = [sharing, y.shape[1], matrix.rows, matrix.columns, matrix.N]
    native().experts(
        call.choice()[:2],
        call.wide,
        pointer(pairs.items),
        *map(pointer, read),
        [*call.counts, pairs.most],
        sizes,
        matrix.bits,
        matrix.group,
        call.in_bfloat16,
        [turn(call), *how],
        NO_GATE if into is None else call.gate,
        known,
        call.early,
        stream(x),
    )
    return y
