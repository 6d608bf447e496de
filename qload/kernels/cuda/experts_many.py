"""Many tokens through the experts that they chose: csrc/cuda/many on the rows of each expert.

Gate, up and what down makes of them are rounded to the type of x, as a layer's outputs are. A token's result
has the same bits whatever other tokens there are, and however many of them.
"""

import torch
from torch import Tensor

from qload.kernels.cuda.experts_call import ExpertMatrix, ExpertsCall
from qload.kernels.cuda.experts_rows import combine, gate_rows, gather_rows
from qload.kernels.cuda.experts_sorted import SortedPairs, sorted_pairs
from qload.kernels.cuda.many import PLACES, STAGE
from qload.kernels.cuda.module import native, pointer, stream

TOKENS = (32, 64, 128)  # of one: the fewest by which most experts are one item
ALL, WHOLE, LAST = range(3)  # tiles of a launch: those of whole turns, and those of a last one as halves
MOST_TURNS = 8  # up to which half a turn less is worth a second launch


def tokens_of_block(call: ExpertsCall) -> int:
    """As many as an expert has, and some more."""
    wanted = 5 * call.pairs / (4 * call.total)
    return next((tokens for tokens in TOKENS if tokens >= wanted), TOKENS[-1])


def columns_of_block(bits: int, tokens: int) -> int:
    """As many as there is room for sums of."""
    return 512 if bits == 4 and tokens <= 64 else 256


def in_pairs(matrix: ExpertMatrix) -> bool:
    """Whether two blocks share K: where blocks for all experts would leave half of the places free.

    It says the same for any tokens, as sums have other bits then.
    """
    blocks = matrix.experts * -(-matrix.columns // columns_of_block(matrix.bits, TOKENS[0]))
    return 2 * blocks <= PLACES and matrix.rows >= 2 * STAGE


def launches(matrix: ExpertMatrix, tokens: int, most_items: int) -> list[tuple[int, int]]:
    """Columns of a block and the tiles that it takes, of each launch of a product. No bit depends on them.

    A last turn that would leave half of the places free is taken by blocks of half the columns.
    """
    columns = columns_of_block(matrix.bits, tokens)
    tiles = most_items * -(-matrix.columns // columns)
    halves = columns == 512 and not in_pairs(matrix) and tiles <= MOST_TURNS * PLACES
    return [(columns, WHOLE), (columns // 2, LAST)] if halves else [(columns, ALL)]


def multiply_many(call: ExpertsCall) -> Tensor:
    """y (M, H)."""
    tokens = tokens_of_block(call)
    rows = call.pairs + tokens  # a block reads whole boxes of them
    with torch.cuda.device(call.x.device):
        pairs = sorted_pairs(call, tokens, placed=True)
        factors = call.weights if call.weighs_inputs else None
        x = gather_rows(call, call.gate_up, call.x, call.top, rows, pairs.order, factors)
        sums = _product(call, pairs, call.gate_up, x, tokens)
        wide = call.down.perm is None
        between = gate_rows(call, sums, call.down.rows if wide else call.down.K, pairs.order, rows)
        if not wide:
            between = _turned(call, pairs, between, rows)
        return combine(call, _product(call, pairs, call.down, between, tokens), pairs.places)


def _turned(call: ExpertsCall, pairs: SortedPairs, between: Tensor, rows: int) -> Tensor:
    """The same rows, each in the order of its expert's inputs."""
    return gather_rows(call, call.down, between, 0, rows, pairs.order)


def _product(call: ExpertsCall, pairs: SortedPairs, matrix: ExpertMatrix, x: Tensor, tokens: int) -> Tensor:
    """(pairs, N), by expert."""
    y: Tensor = x.new_empty(call.pairs, matrix.N)
    read = x, matrix.weights, matrix.scales, matrix.zeros, matrix.bias, y, pairs.items
    for columns, turns in launches(matrix, tokens, pairs.most):
        native().many_experts(
            *map(pointer, read),
            [x.shape[0], matrix.rows, matrix.columns, x.shape[1], matrix.N],
            [matrix.experts, pairs.most],
            matrix.bits,
            matrix.group,
            call.in_bfloat16,
            [tokens, columns, in_pairs(matrix), turns],
            call.early,
            stream(x),
        )
    return y
