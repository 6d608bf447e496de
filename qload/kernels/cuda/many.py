"""Any number of tokens, best from 17 on, times a weight in strips: csrc/cuda/many."""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qload.kernels.cuda import launch
from qload.kernels.cuda.inputs import in_rows
from qload.kernels.cuda.launch import ALIGNED, Launch
from qload.kernels.cuda.module import native

STAGE = 128  # rows that a block has at a time
PLACES = 132  # blocks that an H200 holds at once
SLICES = (1, 2, 3, 4, 6, 8)  # of K, which a second kernel adds up
START = 2.27  # microseconds until blocks multiply and after they have
NEXT = 2.0  # the same where a block goes on to its next tile
ADD = 1.56  # until the second kernel adds,
ADDED = 2.4  # and for each million of sums that it reads
IDLE, MOST_IDLE = 6.74, 0.31  # what is saved where a share of the places is free for the next layer's blocks
LARGE = 1 << 15  # sums of a block for which x of 4-bit layers takes long enough to be shared
NEIGHBOURS = {4: 0.97, 8: 0.96}  # of the time of a stage, where two blocks fetch x for each other


@dataclass(frozen=True)
class ManyBlock:
    """Blocks of so many tokens and columns, and what they took on an H200, in microseconds."""

    tokens: int
    columns: int
    stages: dict[int, float]  # by bits: of all blocks that are there at once
    pair: float  # of two, to add up

    def shares(self, bits: int) -> bool:
        """Whether it may be faster where neighbours share x."""
        return bits == 8 or self.tokens * self.columns >= LARGE


BLOCK_SHAPES = (
    ManyBlock(32, 128, {4: 0.67, 8: 0.62}, 1.5),
    ManyBlock(32, 256, {4: 0.93, 8: 1.18}, 1.1),
    ManyBlock(32, 512, {4: 1.53}, 2.7),
    ManyBlock(64, 128, {4: 0.73, 8: 0.69}, 1.8),
    ManyBlock(64, 256, {4: 1.13, 8: 1.26}, 1.25),
    ManyBlock(64, 512, {4: 1.90}, 2.85),
    ManyBlock(96, 256, {4: 1.30, 8: 1.32}, 1.9),
    ManyBlock(128, 128, {4: 0.97, 8: 0.94}, 1.3),
    ManyBlock(128, 256, {4: 1.575, 8: 1.65}, 2.2),
    ManyBlock(160, 128, {4: 1.08, 8: 1.08}, 1.55),
    ManyBlock(160, 256, {4: 1.97, 8: 2.12}, 2.2),
    ManyBlock(192, 128, {4: 1.23, 8: 1.31}, 1.1),
    ManyBlock(224, 128, {4: 1.35, 8: 1.49}, 3.3),
    ManyBlock(256, 128, {4: 1.57, 8: 1.64}, 3.0),
)


KINDS = {(kind.tokens, kind.columns): kind for kind in BLOCK_SHAPES}
TWO = tuple(product((False, True), repeat=2))  # whether pairs share K, and whether neighbours share x


class ManyDivision(NamedTuple):
    """Tokens and columns of a block, whether two share K, slices of K, whether two neighbours share x.

    Both: neighbours share x; where a last turn has tiles for half of the places or fewer, two blocks share
    the K of each there.
    """

    tokens: int
    columns: int
    pairs: bool
    slices: int
    neighbours: bool = False


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    return call.why_not_hopper() or launch.why_not(call)


def prepare(call: Any, x: Tensor, how: ManyDivision | None = None) -> Launch:
    """The launch of calls like this one, of `x` in whole rows; `how`: else as `division` says."""
    how = how or division(call.tokens, call.rows, call.columns, call.bits)
    kind = call.bits, call.group, x.dtype == torch.bfloat16, [int(each) for each in how]
    start = native().many(launch.sizes(call, x), *kind, call.early)
    return Launch(start, how.slices * call.tokens * call.columns if how.slices > 1 else 0)


def run(call: Any, how: ManyDivision | None = None) -> Tensor:
    """y (M, N); divided as `division` says, or as asked for."""
    x = in_rows(call, ALIGNED // call.x.element_size())
    return launch.run(prepare(call, x, how), call, x)


@cache
def division(tokens: int, K: int, N: int, bits: int = 4) -> ManyDivision:
    """The division of the least time expected."""
    ways = [
        ManyDivision(kind.tokens, kind.columns, pairs, slices, neighbours)
        for kind, (pairs, neighbours), slices in product(BLOCK_SHAPES, TWO, SLICES)
        if bits in kind.stages and slices * (2 if pairs else 1) <= max(1, K // STAGE)
        if not neighbours or kind.shares(bits)
        if not (pairs and neighbours) or (slices == 1 and in_halves(kind, tokens, N))
    ]
    return min(ways, key=lambda way: expected(way, bits, tokens, K, N))


def in_halves(kind: ManyBlock, tokens: int, N: int) -> bool:
    """Whether neighbours have whole turns, and then few enough tiles for two blocks each."""
    turns, last = divmod(-(-N // (2 * kind.columns)) * -(-tokens // kind.tokens), PLACES // 2)
    return turns > 0 and 0 < 2 * last <= PLACES // 2


def expected(way: ManyDivision, bits: int, tokens: int, K: int, N: int) -> float:
    """Microseconds that a division takes on an H200, in a chain of layers."""
    kind = KINDS[way.tokens, way.columns]
    wide = way.columns * (2 if way.neighbours else 1)
    places = PLACES // (2 if way.pairs or way.neighbours else 1)
    tiles, stages = -(-N // wide) * -(-tokens // way.tokens) * way.slices, -(-K // STAGE // way.slices)
    whole = stages * kind.stages[bits] * (NEIGHBOURS[bits] if way.neighbours else 1)
    half = stages / 2 * kind.stages[bits] + kind.pair
    turns = -(-tiles // places)
    if way.pairs and way.neighbours:  # the last turn is of halves
        time = START + (turns - 1) * (whole + NEXT) + half
    elif way.pairs:
        time = turns * (START + half)
    else:
        time = START + (turns - 1) * (whole + NEXT) + whole
    added = ADD + ADDED * way.slices * tokens * N / 1e6 if way.slices > 1 else 0.0
    return time + added - IDLE * min(MOST_IDLE, max(0.0, 1 - tiles / places))
