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
START = 2.83  # microseconds until blocks multiply and after they have, each time that they take turns
ADD = 1.6  # until the second kernel adds,
ADDED = 2.4  # and for each million of sums that it reads
IDLE, MOST_IDLE = 7.14, 0.34  # what is saved where a share of the places is free for the next layer's blocks
LARGE = 1 << 15  # sums of a block for which x of 4-bit layers takes long enough to be shared
NEIGHBOURS = {4: 0.99, 8: 0.96}  # of the time of a stage, where two blocks fetch x for each other
MOST_SHARED = 2048  # tokens; of more, blocks that come in pairs were not seen to be faster


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
    ManyBlock(32, 128, {4: 0.63, 8: 0.58}, 1.5),
    ManyBlock(32, 256, {4: 0.87, 8: 1.11}, 1.1),
    ManyBlock(32, 512, {4: 1.42}, 2.8),
    ManyBlock(64, 128, {4: 0.69, 8: 0.65}, 1.8),
    ManyBlock(64, 256, {4: 1.07, 8: 1.19}, 1.3),
    ManyBlock(64, 512, {4: 1.92}, 2.9),
    ManyBlock(96, 256, {4: 1.27, 8: 1.29}, 1.9),
    ManyBlock(128, 128, {4: 0.94, 8: 0.91}, 1.3),
    ManyBlock(128, 256, {4: 1.60, 8: 1.66}, 2.4),
    ManyBlock(160, 128, {4: 1.10, 8: 1.10}, 1.5),
    ManyBlock(160, 256, {4: 1.93, 8: 2.08}, 2.2),
    ManyBlock(192, 128, {4: 1.17, 8: 1.24}, 1.1),
    ManyBlock(224, 128, {4: 1.35, 8: 1.49}, 3.3),
    ManyBlock(256, 128, {4: 1.56, 8: 1.63}, 2.9),
)


TWO = ((False, False), (True, False), (False, True))  # alone, pairs that share K, neighbours


class ManyDivision(NamedTuple):
    """Tokens and columns of a block, whether two share K, slices of K, whether two neighbours share x."""

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
        if not neighbours or (kind.shares(bits) and tokens <= MOST_SHARED)
    ]
    return min(ways, key=lambda way: expected(way, bits, tokens, K, N))


def expected(way: ManyDivision, bits: int, tokens: int, K: int, N: int) -> float:
    """Microseconds that a division takes on an H200, in a chain of layers."""
    kind = next(kind for kind in BLOCK_SHAPES if (kind.tokens, kind.columns) == way[:2])
    wide, two = way.columns * (2 if way.neighbours else 1), way.pairs or way.neighbours
    places, blocks = PLACES // (2 if two else 1), -(-N // wide) * -(-tokens // way.tokens) * way.slices
    stages = -(-K // STAGE // (way.slices * (2 if way.pairs else 1)))
    of_turn = stages * kind.stages[bits] * (NEIGHBOURS[bits] if way.neighbours else 1)
    turns = -(-blocks // places)
    added = ADD + ADDED * way.slices * tokens * N / 1e6 if way.slices > 1 else 0.0
    idle = min(MOST_IDLE, max(0.0, 1 - blocks / places))
    return turns * (of_turn + START + (kind.pair if way.pairs else 0.0)) + added - IDLE * idle
