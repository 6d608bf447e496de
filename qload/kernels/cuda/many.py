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
PLACES = {False: 132, True: 66}  # blocks, or pairs of them, that an H200 holds at once
SLICES = (1, 2, 3, 4, 6, 8)  # of K, which a second kernel adds up
START = 2.21  # microseconds until blocks multiply and after they have, each time that they take turns
ADD = 1.46  # until the second kernel adds,
ADDED = 2.54  # and for each million of sums that it reads


@dataclass(frozen=True)
class ManyBlock:
    """Blocks of so many tokens and columns, and what they took on an H200, in microseconds."""

    tokens: int
    columns: int
    stages: dict[int, float]  # by bits: of all blocks that are there at once
    pair: float  # of two, to add up


BLOCK_SHAPES = (
    ManyBlock(32, 128, {4: 0.54, 8: 0.60}, 2.1),
    ManyBlock(32, 256, {4: 0.91, 8: 1.20}, 1.2),
    ManyBlock(32, 512, {4: 1.66}, 2.4),
    ManyBlock(64, 128, {4: 0.77, 8: 0.63}, 2.3),
    ManyBlock(64, 256, {4: 1.19, 8: 1.20}, 1.8),
    ManyBlock(64, 512, {4: 2.09}, 3.9),
    ManyBlock(96, 256, {4: 1.43, 8: 1.39}, 2.5),
    ManyBlock(128, 128, {4: 1.00, 8: 0.90}, 2.1),
    ManyBlock(128, 256, {4: 1.73, 8: 1.53}, 3.1),
    ManyBlock(160, 128, {4: 1.18, 8: 1.05}, 2.7),
    ManyBlock(160, 256, {4: 1.96, 8: 1.90}, 3.7),
    ManyBlock(192, 128, {4: 1.34, 8: 1.22}, 2.6),
    ManyBlock(224, 128, {4: 1.50, 8: 1.37}, 3.3),
    ManyBlock(256, 128, {4: 1.57, 8: 1.53}, 3.0),
)


class ManyDivision(NamedTuple):
    """Tokens and columns of a block, whether two share K, slices of K."""

    tokens: int
    columns: int
    pairs: bool
    slices: int


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
    ways = (
        (
            _time(kind, bits, pairs, slices, tokens, K, N),
            ManyDivision(kind.tokens, kind.columns, pairs, slices),
        )
        for kind, pairs, slices in product(BLOCK_SHAPES, PLACES, SLICES)
        if bits in kind.stages and slices * (2 if pairs else 1) <= K // STAGE
    )
    return min(ways)[1]


def _time(kind: ManyBlock, bits: int, pairs: bool, slices: int, tokens: int, K: int, N: int) -> float:
    together = -(-N // kind.columns) * -(-tokens // kind.tokens) * slices  # blocks or pairs
    turns = -(-together // PLACES[pairs])
    stages = -(-K // STAGE // (slices * (2 if pairs else 1)))
    added = ADD + ADDED * slices * tokens * N / 1e6 if slices > 1 else 0.0
    return turns * (stages * kind.stages[bits] + START + (kind.pair if pairs else 0.0)) + added
