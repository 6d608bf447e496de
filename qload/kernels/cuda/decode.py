"""Up to 16 tokens times 4 or 8 bits in Marlin's order, or 24 or 48 in strips: the kernel of csrc/cuda/decode.

It could read x out of order, but takes longer for that than a kernel that puts x in order, of one token too.
"""

from typing import Any

import torch
from torch import Tensor

from qload.kernels.cuda import launch
from qload.kernels.cuda.launch import Launch, in_order
from qload.kernels.cuda.module import native

MOST_TOKENS = {"marlin": 16, "strips": 24}  # by layout
MOST_SYMMETRIC = 48  # of 4 bits in strips without zero points,
LONG = 128  # in groups of so many rows or more


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    most = most_tokens(call)
    if call.tokens > most:
        return f"takes at most {most} tokens, got {call.tokens}"
    return launch.why_not(call, looks_up=True)


def most_tokens(call: Any) -> int:
    """Largest number of tokens for a call's weight."""
    symmetric = call.layout == "strips" and call.bits == 4 and call.zeros is None and call.group >= LONG
    return MOST_SYMMETRIC if symmetric else MOST_TOKENS[call.layout]


def prepare(call: Any, x: Tensor, columns: int = 0, split: int = 0) -> Launch:
    """The launch of calls like this one, of its `x`; a division of 0 is left to the kernel."""
    integers = call.code, call.group, call.offset_zero, call.is_wide
    kind = call.layout == "strips", x.dtype == torch.bfloat16
    return Launch(native().decode(launch.sizes(call, x), *integers, *kind, columns, split, call.early))


def run(call: Any, columns: int = 0, split: int = 0) -> Tensor:
    """y (M, N); a division of 0 is left to the kernel."""
    x = in_order(call)
    return launch.run(prepare(call, x, columns, split), call, x)
