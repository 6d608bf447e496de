"""Up to 256 tokens, from 17 on, times a weight in Marlin's order: csrc/cuda/middle."""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qload.kernels.cuda import launch
from qload.kernels.cuda.launch import ALIGNED, Launch, in_rows
from qload.kernels.cuda.module import native

MOST_TOKENS = 256
STAGE = 64  # rows that a block has at a time
TURN = 2.0  # microseconds until blocks that follow others multiply

# Clusters of 1, 2, ... 8 blocks that an H200 holds at once, by how many blocks a multiprocessor holds.
CLUSTERS = {1: (132, 66, 39, 30, 22, 17, 15, 15), 2: (264, 132, 79, 62, 47, 39, 32, 30)}


@dataclass(frozen=True)
class BlockShape:
    """A block of so many columns and tokens, and its times on an H200, in microseconds."""

    tokens: int
    columns: int
    together: int  # blocks that a multiprocessor holds
    stage: float  # of all blocks that are there at once
    share: float  # of a cluster, to add up


BLOCK_SHAPES = (
    BlockShape(32, 256, 1, 0.49, 1.9),
    BlockShape(32, 256, 2, 0.76, 3.7),
    BlockShape(64, 256, 1, 0.57, 3.1),
    BlockShape(64, 512, 1, 0.99, 5.0),
    BlockShape(128, 256, 1, 0.73, 5.3),
)


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    reason: str | None = call.why_not_hopper()
    if reason:
        return reason
    if call.tokens > MOST_TOKENS:
        return f"takes at most {MOST_TOKENS} tokens, got {call.tokens}"
    return launch.why_not(call)


def prepare(call: Any, x: Tensor, columns: int = 0, split: int = 0, together: int = 0) -> Launch:
    """The launch of calls like this one, of `x` in whole rows; 0: as `division` says."""
    found = division(call.tokens, call.rows, call.columns)
    kind = call.bits, call.group, x.dtype == torch.bfloat16
    how = columns or found.columns, together or found.together, split or found.split
    return Launch(native().middle(launch.sizes(call, x), *kind, *how, call.early))


def run(call: Any, columns: int = 0, split: int = 0, together: int = 0) -> Tensor:
    """y (M, N) by blocks of 256 or 512 columns; `split` of them share K, one or two per multiprocessor.

    0: as `division` says.
    """
    x = in_rows(call, ALIGNED // call.x.element_size())
    return launch.run(prepare(call, x, columns, split, together), call, x)


class WorkDivision(NamedTuple):
    """Columns of a block, blocks of a multiprocessor, blocks per share of K."""

    columns: int
    together: int
    split: int


@cache
def division(tokens: int, K: int, N: int) -> WorkDivision:
    """Division of the least expected time, the same for 4 and 8 bits."""
    fits = min((kind.tokens for kind in BLOCK_SHAPES if kind.tokens >= tokens), default=128)
    kinds = [kind for kind in BLOCK_SHAPES if kind.tokens == fits]
    splits = range(1, min(8, K // STAGE) + 1)
    ways = ((_time(kind, s, tokens, K, N), kind.columns, kind.together, s) for kind in kinds for s in splits)
    return WorkDivision(*min(ways)[1:])


def _time(kind: BlockShape, split: int, tokens: int, K: int, N: int) -> float:
    clusters = -(-N // kind.columns) * -(-tokens // kind.tokens)
    turns = -(-clusters // CLUSTERS[kind.together][split - 1])
    return turns * (-(-K // STAGE // split) * kind.stage + TURN) + (kind.share if split > 1 else 0)
