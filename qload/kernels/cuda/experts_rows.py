"""Rows around the products of experts: x in their order, gate and up made one, a token's choices added up."""

import torch
from torch import Tensor

from qload.kernels.cuda.experts_call import ExpertMatrix, ExpertsCall
from qload.kernels.cuda.module import native, pointer, stream


def gather_rows(
    call: ExpertsCall,
    matrix: ExpertMatrix,
    x: Tensor,
    sharing: int,
    rows: int,
    order: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """(rows, K) as the rows of a matrix are ordered and padded, zeros where no pair is.

    Row i is pair `order[i]`, or i, which has row pair // `sharing` of x, times its factor.
    """
    laid: Tensor = x.new_empty(rows, matrix.rows)
    read = map(pointer, (x, matrix.perm, factors, laid))
    sizes = [rows, sharing, x.shape[1], matrix.rows]
    kind = call.in_bfloat16, call.early, stream(x)
    native().gather_rows(call.choice(order), call.wide, *read, call.counts, sizes, *kind)
    return laid


def gate_rows(
    call: ExpertsCall, sums: Tensor, pitch: int, order: Tensor | None = None, rows: int | None = None
) -> Tensor:
    """(rows, pitch): the activation of each row (2 I,) of `sums`, zeros behind it and where no pair is."""
    rows = call.pairs if rows is None else rows
    between: Tensor = call.x.new_empty(rows, pitch)
    read = map(pointer, (sums, between))
    sizes = [rows, call.down.K, pitch]
    kind = call.in_bfloat16, sums.dtype == torch.float32, call.gate, call.early, stream(sums)
    native().gate_rows(call.choice(order), call.wide, *read, call.counts, sizes, *kind)
    return between


def combine(call: ExpertsCall, sums: Tensor, places: Tensor | None = None) -> Tensor:
    """y (M, H): the rows of a token's pairs, which are `places` or their numbers, each times its weight."""
    y: Tensor = torch.empty_like(call.x)
    weights = None if call.weighs_inputs else call.weights
    read = map(pointer, (sums, weights, y))
    sizes = [call.tokens, call.top, call.down.N]
    kind = call.in_bfloat16, sums.dtype == torch.float32, call.early, stream(sums)
    native().combine_choices(call.choice(places), call.wide, *read, call.counts, sizes, *kind)
    return y
