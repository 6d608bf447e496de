"""Up to 64 tokens times a 4-bit weight in Marlin's order: the kernel of csrc/cuda/w4a16."""

from typing import Any

import torch
from torch import Tensor

from qload.kernels.cuda import launch
from qload.kernels.cuda.launch import Launch, in_order
from qload.kernels.cuda.module import native

MOST_TOKENS = 64


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    if call.bits != 4:
        return f"reads 4 bits, got {call.bits}"
    if call.tokens > MOST_TOKENS:
        return f"takes at most {MOST_TOKENS} tokens, got {call.tokens}"
    return launch.why_not(call)


def prepare(call: Any, x: Tensor, columns: int = 0, split: int = 0) -> Launch:
    """The launch of calls like this one, of its `x`; a division of 0 is left to the kernel."""
    kind = call.group, x.dtype == torch.bfloat16
    return Launch(native().w4a16(launch.sizes(call, x), *kind, columns, split, call.early))


def run(call: Any, columns: int = 0, split: int = 0) -> Tensor:
    """y (M, N); a division of 0 is left to the kernel."""
    x = in_order(call)
    return launch.run(prepare(call, x, columns, split), call, x)
