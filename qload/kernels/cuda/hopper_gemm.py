"""Any number of tokens, best from 17 on, times a weight in strips: csrc/cuda/many."""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qload.kernels.cuda import launch
from qload.kernels.cuda.launch import ALIGNED, Launch, in_rows
from qload.kernels.cuda.module import native

STAGE = 128  # rows that a block has at a time
PLACES = 132  # blocks that an H100 or H200 holds at once
SLICES = (1, 2, 3, 4, 6, 8)  # of K, which a second kernel adds up
START = 3.27  # microseconds until blocks multiply and after they have
NEXT = 1.9  # the same where a block goes on to its next tile
ADD = 1.73  # until the second kernel adds,
ADDED = 1.97  # and for each million of sums that it reads
IDLE, MOST_IDLE = 11.1, 0.2  # what is saved where a share of the places is free for the next layer's blocks
LARGE = 1 << 15  # sums of a block for which x of 4-bit layers takes long enough to be shared
NEIGHBOURS = {4: 0.987, 8: 0.967}  # of the time of a stage, where two blocks fetch x for each other
E2M1, TABLE, TILES = "e2m1", "table of 16", "FP8 in tiles"  # whose operands or sums take longer
OFFSET_SHAPES = ((32, 128, 2), (64, 128, 2), (128, 128, 1), (128, 256, 1))  # of kernels that subtract offsets
INT8_CODES, E4M3_CODES = "int8 codes", "e4m3 codes"  # of x too
# Bits of codes; integers have their width as a name.
BITS = {4: 4, 8: 8, E2M1: 4, TABLE: 4, TILES: 8, INT8_CODES: 8, E4M3_CODES: 8}


@dataclass(frozen=True)
class ManyBlock:
    """A block of so many tokens and columns, and its times on an H100, in microseconds."""

    tokens: int
    columns: int
    stages: dict[int | str, float]  # by codes: of all blocks that are there at once
    pair: float  # of two, or of teams, to add up
    teams: int = 1  # of warps, which take stages in turns

    def shares(self, bits: int) -> bool:
        """Return whether neighbours may be faster with a shared x."""
        return self.teams == 1 and (bits == 8 or self.tokens * self.columns >= LARGE)


BLOCK_SHAPES = (
    ManyBlock(32, 128, {4: 0.63, 8: 0.63, E2M1: 0.696, TABLE: 0.903, TILES: 0.701}, 1.5),
    ManyBlock(32, 256, {8: 1.33, TILES: 1.33}, 1.6),
    ManyBlock(32, 512, {4: 1.42, E2M1: 1.52, TABLE: 2.12}, 2.9),
    ManyBlock(
        64,
        128,
        {4: 0.641, 8: 0.734, E2M1: 0.715, TABLE: 0.857, TILES: 0.856, INT8_CODES: 0.42, E4M3_CODES: 0.42},
        0.3,
    ),
    ManyBlock(64, 512, {4: 1.78, E2M1: 2.15, TABLE: 2.88}, 3.3),
    ManyBlock(96, 256, {4: 1.16, 8: 1.5, E2M1: 1.33, TABLE: 1.67, TILES: 1.52}, 1.9),
    ManyBlock(
        128,
        128,
        {4: 0.782, 8: 0.878, E2M1: 0.859, TABLE: 1.01, TILES: 0.977, INT8_CODES: 0.55, E4M3_CODES: 0.55},
        1.5,
    ),
    ManyBlock(128, 256, {4: 1.49, 8: 1.66, E2M1: 1.65, TABLE: 1.99, TILES: 1.7}, 2.0),
    ManyBlock(160, 128, {4: 0.953, 8: 0.992, E2M1: 0.991, TABLE: 1.14, TILES: 1.13}, 1.1),
    ManyBlock(160, 256, {4: 1.86, 8: 2.04, E2M1: 1.94, TABLE: 2.41, TILES: 2.09}, 4.6),
    ManyBlock(
        192,
        128,
        {4: 1.14, 8: 1.3, E2M1: 1.14, TABLE: 1.35, TILES: 1.51, INT8_CODES: 0.72, E4M3_CODES: 0.75},
        2.2,
    ),
    ManyBlock(224, 128, {4: 1.32, 8: 1.49, E2M1: 1.33, TABLE: 1.47, TILES: 1.73}, 1.4),
    ManyBlock(256, 128, {8: 1.62, TILES: 1.69, INT8_CODES: 0.8, E4M3_CODES: 0.8}, 2.6),
    ManyBlock(128, 192, {4: 1.2, 8: 1.26, E2M1: 1.3, TABLE: 1.58, TILES: 1.3}, 1.7),
    ManyBlock(32, 64, {4: 0.28, 8: 0.355, E2M1: 0.308, TABLE: 0.364, TILES: 0.363}, 1.1, teams=2),
    ManyBlock(32, 128, {4: 0.419, 8: 0.578, E2M1: 0.5, TABLE: 0.65, TILES: 0.589}, 1.3, teams=2),
    ManyBlock(64, 64, {4: 0.299, 8: 0.337, E2M1: 0.306, TABLE: 0.332, TILES: 0.355}, 2.5, teams=2),
    ManyBlock(64, 128, {4: 0.507, 8: 0.69, E2M1: 0.59, TABLE: 0.756, TILES: 0.714}, 1.5, teams=2),
    ManyBlock(96, 128, {4: 0.58, E2M1: 0.631, TABLE: 0.767}, 2.0, teams=2),
)


KINDS = {(kind.tokens, kind.columns, kind.teams): kind for kind in BLOCK_SHAPES}
TWO = tuple(product((False, True), repeat=2))  # whether pairs share K, and whether neighbours share x


class ManyDivision(NamedTuple):
    """Tokens and columns of a block, whether two share K, slices of K, whether two neighbours share x, teams.

    Pairs and neighbours both: neighbours share x; where a last turn has tiles for half of the places or
    fewer, two blocks share the K of each there. Teams of a block's warps take stages of K in turns.
    """

    tokens: int
    columns: int
    pairs: bool
    slices: int
    neighbours: bool = False
    teams: int = 1

    @property
    def parts(self) -> int:
        """Parts of K; each needs at least a stage."""
        return self.slices * self.teams * (2 if self.pairs else 1)


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    if call.is_wide:
        return "takes scales of 16 bits, got float32"
    return call.why_not_hopper() or launch.why_not(call)


def prepare(call: Any, x: Tensor, how: ManyDivision | None = None) -> Launch:
    """The launch of calls like this one, of `x` in whole rows; `how`: else as `division` says."""
    how = how or division(call.tokens, call.rows, call.columns, call.timed_as, call.offset_zero >= 0)
    kind = call.code, call.group, call.offset_zero, x.dtype == torch.bfloat16, [int(each) for each in how]
    start = native().many(launch.sizes(call, x), *kind, call.early)
    return Launch(start, how.slices * call.tokens * call.columns if how.slices > 1 else 0)


def run(call: Any, how: ManyDivision | None = None) -> Tensor:
    """y (M, N); divided as `division` says, or as asked for."""
    x = in_rows(call, ALIGNED // call.x.element_size())
    return launch.run(prepare(call, x, how), call, x)


@cache
def division(tokens: int, K: int, N: int, codes: int | str = 4, offsets: bool = False) -> ManyDivision:
    """Return the division of the least time expected, for codes by their name in `BITS`, and `offsets`."""
    ways = [
        way
        for kind, (pairs, neighbours), slices in product(BLOCK_SHAPES, TWO, SLICES)
        for way in [ManyDivision(kind.tokens, kind.columns, pairs, slices, neighbours, kind.teams)]
        if codes in kind.stages and way.parts <= max(1, K // STAGE)
        if not offsets or (kind.tokens, kind.columns, kind.teams) in OFFSET_SHAPES
        if not neighbours or kind.shares(BITS[codes])
        if not (pairs and neighbours) or (slices == 1 and in_halves(kind, tokens, N))
    ]
    return min(ways, key=lambda way: expected(way, codes, tokens, K, N))


def in_halves(kind: ManyBlock, tokens: int, N: int) -> bool:
    """Return whether neighbours have whole turns, and then few enough tiles for two blocks each."""
    turns, last = divmod(-(-N // (2 * kind.columns)) * -(-tokens // kind.tokens), PLACES // 2)
    return turns > 0 and 0 < 2 * last <= PLACES // 2


def expected(way: ManyDivision, codes: int | str, tokens: int, K: int, N: int) -> float:
    """Expected microseconds of a division on an H100, in a chain of layers."""
    kind = KINDS[way.tokens, way.columns, way.teams]
    wide = way.columns * (2 if way.neighbours else 1)
    places = PLACES // (2 if way.pairs or way.neighbours else 1)
    tiles, stages = -(-N // wide) * -(-tokens // way.tokens) * way.slices, -(-K // STAGE // way.slices)
    whole = stages * kind.stages[codes] * (NEIGHBOURS[BITS[codes]] if way.neighbours else 1)
    half = stages / 2 * kind.stages[codes] + kind.pair
    turns = -(-tiles // places)
    if way.pairs and way.neighbours:  # the last turn is of halves
        time = START + (turns - 1) * (whole + NEXT) + half
    elif way.pairs:
        time = turns * (START + half)
    elif way.teams > 1:
        time = turns * (START + whole + kind.pair)
    else:
        time = START + (turns - 1) * (whole + NEXT) + whole
    added = ADD + ADDED * way.slices * tokens * N / 1e6 if way.slices > 1 else 0.0
    return time + added - IDLE * min(MOST_IDLE, max(0.0, 1 - tiles / places))
