"""17 tokens and more times a weight in Marlin's order, on Hopper: the kernel of csrc/cuda/middle."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qload.kernels.cuda import launch
from qload.kernels.cuda.inputs import in_rows
from qload.kernels.cuda.launch import ALIGNED
from qload.kernels.cuda.module import native

CAPABILITY = 9
FEWEST_TOKENS, MOST_TOKENS = 17, 256
STAGE = 64  # rows that a block has at a time
TURN = 2.0  # microseconds until blocks that follow others multiply

# Clusters of 1, 2, ... 8 blocks that an H200 holds at once, by how many blocks a multiprocessor holds.
CLUSTERS = {1: (132, 66, 39, 30, 22, 17, 15, 15), 2: (264, 132, 79, 62, 47, 39, 32, 30)}


@dataclass(frozen=True)
class Kind:
    """Blocks of so many columns and tokens, and what they took on an H200, in microseconds."""

    tokens: int
    columns: int
    together: int  # blocks that a multiprocessor holds
    stage: float  # of all blocks that are there at once
    share: float  # of a cluster, to add up


KINDS = (
    Kind(32, 256, 2, 0.85, 4.0),
    Kind(32, 512, 1, 0.88, 4.5),
    Kind(64, 256, 1, 0.60, 5.7),
    Kind(64, 512, 1, 1.05, 8.0),
    Kind(128, 256, 1, 0.75, 7.0),
)


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    major, minor = torch.cuda.get_device_capability(call.x.device)
    if major != CAPABILITY:
        return f"needs a device of capability {CAPABILITY}.0, got {major}.{minor}"
    if not native().hopper:
        return "the CUDA module was built without QLOAD_CUDA_ARCHS=90a"
    if not FEWEST_TOKENS <= call.tokens <= MOST_TOKENS:
        return f"takes {FEWEST_TOKENS} to {MOST_TOKENS} tokens, got {call.tokens}"
    return launch.why_not(call)


def run(call: Any, columns: int = 0, split: int = 0) -> Tensor:
    """y (M, N) by blocks of 256 or 512 columns, `split` of which share K; 0: as `division` says."""
    x = in_rows(call, ALIGNED // call.x.element_size())
    seen = _seen(call)
    columns, split = columns or seen[0], split or seen[1]
    return launch.launch("middle", call, x, (), (call.bits, call.group), columns, split)


def _seen(call: Any) -> tuple[int, int]:
    """The division that is best of those that tests have run on a device."""
    if call.bits == 8:
        return 256, 1
    return division(call.tokens, call.rows, call.columns, call.x.dtype == torch.float16)


@cache
def division(tokens: int, K: int, N: int, wide: bool) -> tuple[int, int]:
    """Columns of a block and blocks that share K, of the least time expected; `wide`: also 512 columns."""
    fits = min((kind.tokens for kind in KINDS if kind.tokens >= tokens), default=128)
    kinds = [kind for kind in KINDS if kind.tokens == fits and (wide or kind.columns == 256)]
    splits = range(1, min(8, K // STAGE) + 1)
    _, columns, split = min((_time(kind, s, tokens, K, N), kind.columns, s) for kind in kinds for s in splits)
    return columns, split


def _time(kind: Kind, split: int, tokens: int, K: int, N: int) -> float:
    clusters = -(-N // kind.columns) * -(-tokens // kind.tokens)
    turns = -(-clusters // CLUSTERS[kind.together][split - 1])
    return turns * (-(-K // STAGE // split) * kind.stage + TURN) + (kind.share if split > 1 else 0)
