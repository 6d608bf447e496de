"""Any number of tokens, best from 17 on, times a weight in strips, from Ampere on: csrc/cuda/mma."""

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qload.kernels.chips import LEAST_SHARED, multiprocessors, shared_memory
from qload.kernels.cuda import launch
from qload.kernels.cuda.launch import ALIGNED, Launch, in_rows
from qload.kernels.cuda.module import native
from qload.layouts import strips

WARPS = 8  # of a block
WARP_TOKENS = (32, 48, 64)
MAX_WIDE = 48  # tokens of a warp by scales in float32
SHARES = (1, 2, 4, 8)
SLICES = (1, 2, 3, 4, 6, 8, 12, 16)  # of K, which a second kernel adds up
MARGIN = 2 << 10  # bytes of shared memory beside the stages
TOKEN_BYTES, TILE_BYTES = 128, 2560  # of x of a token and of words and scales of a tile in a stage,
WIDE_BYTES = 512  # and of scales in float32 beyond those
START = 7.63  # microseconds of a turn of blocks beside its chunks
CHUNK = {32: 2.01, 48: 2.5, 64: 2.8}  # of 128 rows, by tokens of a warp,
COPIED = 0.016  # and for each KiB of a stage
ADDED = 2.17  # for each million of sums of slices


class MmaDivision(NamedTuple):
    """Tokens of a warp, tiles of 64 columns of a block, warps that share the rows of each, slices of K."""

    tokens: int
    tiles: int
    row_warps: int
    slices: int

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.tokens * WARPS // (self.tiles * self.row_warps)


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    return launch.why_not(call)


def prepare(call: Any, x: Tensor, how: MmaDivision | None = None) -> Launch:
    """Return the launch of calls like this one, of `x` in whole rows; `how` None: by `division`."""
    chip = multiprocessors(x.device), shared_memory(x.device)
    how = how or division(call.tokens, call.rows, call.columns, *chip, call.is_wide)
    kind = call.code, call.group, call.offset_zero, call.is_wide
    start = native().mma(launch.sizes(call, x), *kind, x.dtype == torch.bfloat16, list(how), call.early)
    return Launch(start, how.slices * call.tokens * call.columns if how.slices > 1 else 0)


def run(call: Any, how: MmaDivision | None = None) -> Tensor:
    """Return y (M, N); `how` None: divided by `division`."""
    x = in_rows(call, ALIGNED // call.x.element_size())
    return launch.run(prepare(call, x, how), call, x)


@cache
def division(
    tokens: int, K: int, N: int, places: int, shared: int = LEAST_SHARED, wide: bool = False
) -> MmaDivision:
    """Return the division of the least expected time, by multiprocessors and a block's shared memory.

    `wide`: scales are float32.
    """
    ways = [
        way
        for warp_tokens, tiles, row_warps, slices in product(WARP_TOKENS, SHARES, SHARES, SLICES)
        for way in [MmaDivision(warp_tokens, tiles, row_warps, slices)]
        if WARPS % (tiles * row_warps) == 0
        and fits(way, shared, wide)
        and row_warps * slices <= max(1, K // strips.TILE_K)
    ]
    return min(ways, key=lambda way: expected(way, tokens, K, N, places))


def fits(way: MmaDivision, shared: int = LEAST_SHARED, wide: bool = False) -> bool:
    """Return whether two stages fit a block's shared memory, and `wide` scales the registers."""
    if wide and way.tokens > MAX_WIDE:
        return False
    return 2 * stage_bytes(way, wide) <= shared - MARGIN


def stage_bytes(way: MmaDivision, wide: bool = False) -> int:
    """Return the bytes of a stage: 64 inputs of each token, and words of 4 bits with their scales."""
    tile = TILE_BYTES + (WIDE_BYTES if wide else 0)
    return way.row_warps * (way.block_tokens * TOKEN_BYTES + way.tiles * tile)


def expected(way: MmaDivision, tokens: int, K: int, N: int, places: int) -> float:
    """Return the expected microseconds of a division, by times of an H100 with code of compute_80."""
    blocks = -(-tokens // way.block_tokens) * -(-N // (way.tiles * strips.TILE_N)) * way.slices
    turns = -(-blocks // places)
    chunks = -(-K // strips.TILE_K // way.slices // way.row_warps)
    chunk = CHUNK[way.tokens] + COPIED * stage_bytes(way) / 1024
    added = ADDED * way.slices * tokens * N / 1e6 if way.slices > 1 else 0.0
    return turns * (START + chunks * chunk) + added
