"""Launches of the CUDA kernels for experts: few tokens (csrc/cuda/experts) and many (csrc/cuda/many).

For experts that declare quantized inputs, one launch before each product rounds the inputs, as for a linear
(`cuda.linear`). The product reads the rounded numbers, and multiplies the sums of a row by its factor.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qload.kernels.cuda.hopper_gemm import PLACES, STAGE
from qload.kernels.cuda.module import native, pointer, stream
from qload.kernels.cuda.quantize import RoundedInputs
from qload.layouts import strips
from qload.spec import ActivationScheme

EIGHT = 8  # inputs that a thread loads together
GATES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix of each of E experts in strips, stacked; `group_size` -1: one scale a column.

    `code`: number of the code in csrc/cuda/device/code.h; for integers, their bits. `zeros`: zero
    points; for codes with scales of groups, scales of columns. `N`, `K`: outputs and inputs, which may be
    padded in the tensors. `perm`: input of each row in act order; rows without an input come last.
    """

    weights: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    bias: Tensor | None
    N: int
    K: int
    code: int
    group_size: int

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.code & 0xFF

    @property
    def width(self) -> int:
        """Columns of x: K, or the padded rows of the matrix if it has act order or K is no multiple of 8."""
        return self.rows if self.perm is not None or self.K % EIGHT else self.K

    @property
    def experts(self) -> int:
        """E, on this rank."""
        return self.weights.shape[0]

    @property
    def rows(self) -> int:
        """K with padding."""
        return self.weights.shape[2] // (2 * self.bits)

    @property
    def columns(self) -> int:
        """N with padding."""
        return self.weights.shape[1] * strips.TILE_N

    @property
    def group(self) -> int:
        """Rows of a group."""
        return self.rows if self.group_size == -1 else self.group_size


@dataclass(frozen=True)
class ExpertsCall:
    """Operands of a call: x (M, H), ids and weights (M, top) of the chosen experts, and their matrices.

    `map`: the place of each of all experts among those here, -1: it is elsewhere; None: all are here.
    `gate`: its number in `GATES`, alpha and limit. `weighs_inputs`: weights multiply x, not the result.
    `schemes`: quantization of the inputs of gate and up, and of down; None: none. `input_scales`: the stored
    scales (E,) that these read, in float32.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    map: Tensor | None
    gate_up: ExpertMatrix
    down: ExpertMatrix
    gate: tuple[int, float, float]
    weighs_inputs: bool
    early: bool = True
    schemes: tuple[ActivationScheme | None, ActivationScheme | None] = (None, None)
    input_scales: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def tokens(self) -> int:
        """M."""
        return self.x.shape[0]

    @property
    def top(self) -> int:
        """Number of experts of a token."""
        return self.ids.shape[1]

    @property
    def pairs(self) -> int:
        """Tokens times choices."""
        return self.ids.numel()

    @property
    def total(self) -> int:
        """Experts on all ranks."""
        return self.down.experts if self.map is None else self.map.numel()

    @property
    def counts(self) -> list[int]:
        """Numbers of pairs, of all experts, and of local ones."""
        return [self.pairs, self.total, self.down.experts]

    def choice(self, rows: Tensor | None = None) -> list[int]:
        """Pointers to ids, to the map of experts, and to the rows of pairs or pairs of rows."""
        return [pointer(self.ids), pointer(self.map), pointer(rows)]

    @property
    def wide(self) -> bool:
        """True if ids have 64 bits."""
        return self.ids.dtype == torch.int64

    @property
    def in_bfloat16(self) -> bool:
        """True for x of bfloat16, not float16."""
        return self.x.dtype == torch.bfloat16


def gather_rows(
    call: ExpertsCall,
    matrix: ExpertMatrix,
    x: Tensor,
    sharing: int,
    rows: int,
    order: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Gather rows of x in the order of a matrix's rows, padded with zeros: (rows, width).

    Row i is pair `order[i]`, or i, which has row pair // `sharing` of x, times its factor.
    """
    laid: Tensor = x.new_empty(rows, matrix.width)
    read = map(pointer, (x, matrix.perm, factors, laid))
    sizes = [rows, sharing, x.shape[1], matrix.width]
    kind = call.in_bfloat16, call.early, stream(x)
    native().gather_rows(call.choice(order), call.wide, *read, call.counts, sizes, *kind)
    return laid


def gate_rows(
    call: ExpertsCall, sums: Tensor, pitch: int, order: Tensor | None = None, rows: int | None = None
) -> Tensor:
    """Apply the activation to each row (2 I,) of `sums`: (rows, pitch), padded with zeros."""
    rows = call.pairs if rows is None else rows
    between: Tensor = call.x.new_empty(rows, pitch)
    read = map(pointer, (sums, between))
    sizes = [rows, call.down.K, pitch]
    kind = call.in_bfloat16, sums.dtype == torch.float32, call.gate, call.early, stream(sums)
    native().gate_rows(call.choice(order), call.wide, *read, call.counts, sizes, *kind)
    return between


def combine(call: ExpertsCall, sums: Tensor, places: Tensor | None = None) -> Tensor:
    """Sum the rows of each token's pairs, times their weights: y (M, H); `places`: rows of the pairs."""
    y: Tensor = torch.empty_like(call.x)
    weights = None if call.weighs_inputs else call.weights
    read = map(pointer, (sums, weights, y))
    sizes = [call.tokens, call.top, call.down.N]
    kind = call.in_bfloat16, sums.dtype == torch.float32, call.early, stream(sums)
    native().combine_choices(call.choice(places), call.wide, *read, call.counts, sizes, *kind)
    return y


@dataclass(frozen=True)
class SortedPairs:
    """Pairs by expert, and items of up to `tokens` of them.

    `order` (pairs,): -1 at the end, of pairs whose experts are elsewhere. `places` (pairs,): where each is in
    it, -1: nowhere. `items` (most + 1, 4 + tokens): expert, first place, count, items in all, and the pairs;
    behind the last, counts of -1. None where each pair is an item of its own.
    """

    order: Tensor | None
    places: Tensor | None
    items: Tensor | None
    most: int


def unsorted(call: ExpertsCall) -> SortedPairs:
    """Each pair alone: no launch, but a matrix is read once for each of its pairs."""
    return SortedPairs(None, None, None, call.pairs)


def sorted_pairs(call: ExpertsCall, tokens: int, placed: bool = False) -> SortedPairs:
    """One launch; `tokens`: the most of an item, a multiple of 4. `placed`: with `order` and `places`."""
    pairs, experts = call.pairs, min(call.pairs, call.down.experts)
    most = (pairs + experts * (tokens - 1)) // tokens  # whole items, and one of each expert that is not
    items = call.ids.new_empty((most + 1, 4 + tokens), dtype=torch.int32)
    order, places = call.ids.new_empty((2, pairs), dtype=torch.int32) if placed else (None, None)
    sizes = [*call.counts, tokens, most]
    native().sort_by_expert(
        *map(pointer, (call.ids, call.map)),
        call.wide,
        *map(pointer, (order, places, items)),
        sizes,
        stream(call.x),
    )
    return SortedPairs(order, places, items, most)


PAIR = 2 * strips.TILE_N  # columns of gate and up of which each tile has its own
NO_GATE = (-1, 0.0, 0.0)
MOST_OF_EIGHT = 12  # pairs of an expert, on average, up to which eight at once are faster
SHORT = 1024  # rows that four warps would share badly
FILLED = 88  # blocks of two tiles by which a chip is filled: fewer are made of more warps


class ExpertsDivision(NamedTuple):
    """Tiles of 64 columns of a block, and warps along K. The latter determine the bits of a result."""

    columns: int
    row_warps: int


@cache
def division(N: int, K: int, top: int, gated: bool) -> ExpertsDivision:
    """Division by the columns of one token and the rows of a warp; other tokens have no effect."""
    blocks = top * N // PAIR
    if blocks < FILLED:
        return ExpertsDivision(2, 6) if gated else ExpertsDivision(1, 12)
    if not gated and K > SHORT and blocks < PLACES:
        return ExpertsDivision(1, 8)
    return ExpertsDivision(2, 4) if gated or K > SHORT else ExpertsDivision(1, 3)


def turn(call: ExpertsCall) -> int:
    """Tokens of a block: 8, or 16 if a second read of an expert takes longer."""
    return 8 if call.pairs <= MOST_OF_EIGHT * call.total else 16


class Rows(NamedTuple):
    """Inputs of a product: rows (n, width), the number of pairs that share a row, and factors of the sums.

    `of_rows`: whether factors are of rows, not of pairs.
    """

    x: Tensor
    sharing: int
    factors: Tensor | None = None
    of_rows: bool = False


class Rounding:
    """Launches that quantize the inputs of gate and up (0) and of down (1) by the schemes of a call.

    `rows`: number of rows; `order`: pair of each row; None: row i is pair i.
    """

    def __init__(self, call: ExpertsCall, rows: int, order: Tensor | None = None) -> None:
        self._call, self._scales = call, None
        if any(scale is not None for scale in call.input_scales):
            self._scales = call.x.new_empty((2, rows), dtype=torch.float32)
            stored = list(map(pointer, call.input_scales))
            to, kind = pointer(self._scales), (call.early, stream(call.x))
            native().spread_values(call.choice(order), call.wide, stored, to, call.counts, rows, *kind)

    def __call__(self, matrix: int, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Quantize x (n, K): rounded numbers, and a factor of each row (n,); x and None without a scheme."""
        scheme = self._call.schemes[matrix]
        if scheme is None:
            return x, None
        scales = None if self._call.input_scales[matrix] is None else self._scales
        launch = _rounding(native(), x.dtype, x.shape[1], scheme, scales is not None)
        scale = 0 if scales is None else pointer(scales[matrix])
        memory, _ = launch.start(x, x.shape[0], scale, 0, stream(x))
        return launch.split(memory, x.shape[0])


@cache
def _rounding(
    module: Any, dtype: torch.dtype, K: int, scheme: ActivationScheme, scale_each: bool
) -> RoundedInputs:
    """Launch that rounds inputs, shared by calls."""
    stored = torch.float32 if scale_each else None
    return RoundedInputs(module, dtype, K, scheme, (stored, None), scale_each=scale_each)


def multiply_few(call: ExpertsCall) -> Tensor:
    """y (M, H)."""
    with torch.cuda.device(call.x.device):
        pairs = unsorted(call) if call.tokens == 1 else sorted_pairs(call, turn(call))
        rounding = Rounding(call, call.pairs)
        between = in_order(call, call.down, _between(call, pairs, rounding), 1)
        numbers, factors = rounding(1, between.x)
        inputs = Rows(numbers, 1, factors, of_rows=True)
        return combine(call, product(call, pairs, call.down, inputs, known=True))


def _inputs(call: ExpertsCall, rounding: Rounding) -> Rows:
    """Inputs of gate and up."""
    weights = call.weights if call.weighs_inputs else None
    if call.schemes[0] is None:
        return in_order(call, call.gate_up, call.x, call.top)._replace(factors=weights)
    x, sharing = call.x, call.top
    if weights is not None or call.input_scales[0] is not None:  # each pair has a scale of its own
        x, sharing = gather_rows(call, call.gate_up, x, sharing, call.pairs, factors=weights), 1
    numbers, factors = rounding(0, x)
    return Rows(numbers, sharing, factors, of_rows=True)


def _between(call: ExpertsCall, pairs: SortedPairs, rounding: Rounding) -> Tensor:
    """Activations of gate and up: (pairs, I), padded if I is no multiple of 8."""
    inputs, inner = _inputs(call, rounding), call.down.K
    if call.gate_up.columns == 2 * inner and inner % strips.TILE_N == 0:
        return product(call, pairs, call.gate_up, inputs, call.x.new_empty((call.pairs, inner)))
    return gate_rows(call, product(call, pairs, call.gate_up, inputs), _pitch(call))


def _pitch(call: ExpertsCall) -> int:
    """Columns of the activations of a pair."""
    return call.down.width if call.down.perm is None else call.down.K


def in_order(call: ExpertsCall, matrix: ExpertMatrix, x: Tensor, sharing: int) -> Rows:
    """Gather x in the order and width of the rows of a matrix, if it differs."""
    if x.shape[1] == matrix.width and matrix.perm is None:
        return Rows(x, sharing)
    return Rows(gather_rows(call, matrix, x, sharing, call.pairs), 1)


def product(
    call: ExpertsCall,
    pairs: SortedPairs,
    matrix: ExpertMatrix,
    inputs: Rows,
    into: Tensor | None = None,
    known: bool = False,
) -> Tensor:
    """Multiply by a matrix: float32 (pairs, N); or by gate and up with the activation, `into` memory.

    `known`: a kernel that waited for the pairs to be sorted ran in between, so that nobody has to again.
    """
    x = inputs.x
    y = x.new_empty((call.pairs, matrix.N), dtype=torch.float32) if into is None else into
    how = division(matrix.columns, matrix.rows, call.top, into is not None)
    read = x, matrix.weights, matrix.scales, matrix.zeros, matrix.bias, inputs.factors, y
    sizes = [inputs.sharing, y.shape[1], x.shape[1], matrix.rows, matrix.columns, matrix.N]
    native().experts(
        call.choice()[:2],
        call.wide,
        pointer(pairs.items),
        *map(pointer, read),
        [*call.counts, pairs.most],
        sizes,
        matrix.code,
        matrix.group,
        call.in_bfloat16,
        [turn(call), *how],
        NO_GATE if into is None else call.gate,
        inputs.of_rows,
        known,
        call.early,
        stream(x),
    )
    return y


TOKENS = (32, 64, 128)  # of one: the fewest by which most experts are one item
ALL, WHOLE, LAST = range(3)  # tiles of a launch: those of whole turns, and those of a last one as halves
MOST_TURNS = 8  # up to which half a turn less is worth a second launch


def tokens_of_block(call: ExpertsCall) -> int:
    """Number of tokens of a block: as many as an expert has on average, and a quarter more."""
    wanted = 5 * call.pairs / (4 * call.total)
    return next((tokens for tokens in TOKENS if tokens >= wanted), TOKENS[-1])


def columns_of_block(bits: int, tokens: int) -> int:
    """Columns of a block, limited by the memory for sums."""
    return 512 if bits == 4 and tokens <= 64 else 256


def in_pairs(matrix: ExpertMatrix) -> bool:
    """True if two blocks share K, because blocks for all experts fill at most half of the places.

    The number of tokens has no effect: it would change the bits of sums.
    """
    blocks = matrix.experts * -(-matrix.columns // columns_of_block(matrix.bits, TOKENS[0]))
    return 2 * blocks <= PLACES and matrix.rows >= 2 * STAGE


def launches(matrix: ExpertMatrix, tokens: int, most_items: int) -> list[tuple[int, int]]:
    """Columns of a block and its tiles, for each launch of a product. No bit depends on them.

    Blocks of half the columns do a last turn with at least half of the places free.
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
        rounding = Rounding(call, rows, pairs.order)
        sums = _product(call, pairs, call.gate_up, *rounding(0, x), tokens)
        between = gate_rows(call, sums, _pitch(call), pairs.order, rows)
        if call.down.perm is not None:
            between = _turned(call, pairs, between, rows)
        sums = _product(call, pairs, call.down, *rounding(1, between), tokens)
        return combine(call, sums, pairs.places)


def _turned(call: ExpertsCall, pairs: SortedPairs, between: Tensor, rows: int) -> Tensor:
    """Reorder each row to the inputs of its expert."""
    return gather_rows(call, call.down, between, 0, rows, pairs.order)


def _product(
    call: ExpertsCall,
    pairs: SortedPairs,
    matrix: ExpertMatrix,
    x: Tensor,
    factors: Tensor | None,
    tokens: int,
) -> Tensor:
    """(pairs, N), by expert."""
    y: Tensor = x.new_empty(call.pairs, matrix.N)
    read = x, matrix.weights, matrix.scales, matrix.zeros, matrix.bias, factors, y, pairs.items
    for columns, turns in launches(matrix, tokens, pairs.most):
        native().many_experts(
            *map(pointer, read),
            [x.shape[0], matrix.rows, matrix.columns, x.shape[1], matrix.N],
            [matrix.experts, pairs.most],
            matrix.code,
            matrix.group,
            call.in_bfloat16,
            [tokens, columns, in_pairs(matrix), turns],
            call.early,
            stream(x),
        )
    return y
