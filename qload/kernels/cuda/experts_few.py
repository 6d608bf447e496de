"""Few tokens through the experts that they chose: a pass over gate and up, one over down, and the sum.

A token's result has the same bits whatever other tokens there are, and however many of them.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from qload.kernels.cuda.experts_call import ExpertMatrix, ExpertsCall
from qload.kernels.cuda.experts_sorted import SortedPairs, sorted_pairs, unsorted
from qload.kernels.cuda.module import native, pointer, stream
from qload.layouts import strips

PAIR = 2 * strips.TILE_N  # columns of gate and up of which each tile has its own
NO_GATE = (-1, 0.0, 0.0)
FILLED = 88  # blocks of two tiles by which a chip is filled: fewer are made of more warps


class ExpertsDivision(NamedTuple):
    """Tiles of 64 columns of a block, and warps that share K. The latter decide the bits of a result."""

    columns: int
    row_warps: int


@cache
def division(N: int, top: int, gated: bool) -> ExpertsDivision:
    """By the columns that one token asks for, so that its bits depend on no other."""
    if top * N // PAIR >= FILLED:
        return ExpertsDivision(2, 4)
    return ExpertsDivision(2, 6) if gated else ExpertsDivision(1, 12)


def turn(call: ExpertsCall) -> int:
    """Tokens that a block takes at once: 8, or 16 where most experts have more."""
    return 8 if call.pairs <= 6 * call.total else 16


def multiply_few(call: ExpertsCall) -> Tensor:
    """y (M, H)."""
    with torch.cuda.device(call.x.device):
        pairs = unsorted(call) if call.tokens == 1 else sorted_pairs(call, turn(call))
        sums = _product(call, pairs, call.down, _between(call, pairs), 1)
        y: Tensor = torch.empty_like(call.x)
        weights = None if call.weighs_inputs else call.weights_in_float32
        read = pointer(sums), pointer(weights), pointer(y)
        sizes = [call.tokens, call.top, call.down.N]
        kind = call.in_bfloat16, True, call.early, stream(call.x)
        native().combine_choices(call.choice(), call.wide, *read, call.counts, sizes, *kind)
    return y


def _between(call: ExpertsCall, pairs: SortedPairs) -> Tensor:
    """(pairs, I) or as wide as down is padded: the activation of each pair."""
    x, sharing = in_order(call, call.gate_up, call.x, call.top, None, call.pairs)
    inner = call.down.K
    pitch = inner if call.down.perm is not None else call.down.rows
    made = call.x.new_empty if pitch == inner else call.x.new_zeros
    between: Tensor = made((call.pairs, pitch))
    factors = call.weights_in_float32 if call.weighs_inputs else None
    if call.gate_up.columns == 2 * inner and inner % strips.TILE_N == 0:
        _product(call, pairs, call.gate_up, x, sharing, factors, between)
    else:
        sums = _product(call, pairs, call.gate_up, x, sharing, factors)
        sizes = [call.pairs, inner, pitch]
        kind = call.in_bfloat16, True, call.gate, call.early, stream(x)
        native().gate_rows(
            call.choice(), call.wide, *map(pointer, (sums, between)), call.counts, sizes, *kind
        )
    return in_order(call, call.down, between, 1, None, call.pairs)[0]


def in_order(
    call: ExpertsCall, matrix: ExpertMatrix, x: Tensor, sharing: int, order: Tensor | None, rows: int
) -> tuple[Tensor, int]:
    """x as the rows of a matrix are ordered and padded, one of each row of `order`, and how many share one."""
    if order is None and x.shape[1] == matrix.rows and matrix.perm is None:
        return x, sharing
    laid: Tensor = x.new_empty(rows, matrix.rows)
    choice = call.choice(order), call.wide
    read = map(pointer, (x, matrix.perm, laid))
    sizes = [rows, sharing, x.shape[1], matrix.rows]
    native().gather_rows(*choice, *read, call.counts, sizes, call.early, stream(x))
    return laid, 1


def _product(
    call: ExpertsCall,
    pairs: SortedPairs,
    matrix: ExpertMatrix,
    x: Tensor,
    sharing: int,
    factors: Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """float32 (pairs, N) of a matrix; or gate and up as one, `into` memory that is given."""
    y = x.new_empty((call.pairs, matrix.N), dtype=torch.float32) if into is None else into
    how = division(matrix.columns, call.top, into is not None)
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
        matrix is call.down,
        call.early,
        stream(x),
    )
    return y
