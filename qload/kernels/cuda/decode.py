"""Up to 16 tokens times 4 or 8 bits in Marlin's order or in strips: the kernel of csrc/cuda/decode."""

from typing import Any

import torch
from torch import Tensor

from qload.kernels.cuda.inputs import why_not_aligned
from qload.kernels.cuda.module import native, pointer, stream

MOST_TOKENS = 16


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    if call.tokens > MOST_TOKENS:
        return f"takes {MOST_TOKENS} tokens, got {call.tokens}"
    if call.perm is not None and not call.is_k_full:
        return "rows of a permuted group are missing here, and that it looks them up right is not yet seen"
    return why_not_aligned(call)


def run(call: Any, columns: int = 0, split: int = 0) -> Tensor:
    """y (M, N); a division of 0 is left to the kernel."""
    x = call.x
    y: Tensor = x.new_empty(x.shape[0], call.N)
    g_idx = None if call.is_k_full else call.g_idx
    with torch.cuda.device(x.device):
        native().decode(
            *map(pointer, (x, call.weights, call.scales, call.zeros, g_idx, call.perm, call.bias, y)),
            [x.shape[0], call.rows, call.columns, x.shape[1], call.N],
            call.bits,
            call.group,
            call.layout == "strips",
            x.dtype == torch.bfloat16,
            columns,
            split,
            call.early,
            stream(x),
        )
    return y
