"""Up to 64 tokens times a 4-bit weight in Marlin's order: the kernel of csrc/cuda/w4a16."""

from typing import Any

import torch
from torch import Tensor

from qload.kernels.cuda.inputs import why_not_aligned
from qload.kernels.cuda.module import native, pointer, stream

MOST_TOKENS = 64


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    if call.bits != 4:
        return f"reads 4 bits, got {call.bits}"
    if call.tokens > MOST_TOKENS:
        return f"takes {MOST_TOKENS} tokens, got {call.tokens}"
    if call.perm is not None and not call.is_k_full:
        return "rows of a permuted group are missing here, and it counts groups by their size"
    return why_not_aligned(call)


def run(call: Any, columns: int = 0, split: int = 0) -> Tensor:
    """y (M, N); a division of 0 is left to the kernel."""
    x = call.x
    y: Tensor = x.new_empty(x.shape[0], call.N)
    with torch.cuda.device(x.device):
        native().w4a16(
            *map(pointer, (x, call.weights, call.scales, call.zeros, call.perm, call.bias, y)),
            [x.shape[0], call.rows, call.columns, x.shape[1], call.N],
            call.group,
            x.dtype == torch.bfloat16,
            columns,
            split,
            call.early,
            stream(x),
        )
    return y
