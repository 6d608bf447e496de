"""Up to 64 tokens times a 4-bit weight in Marlin's order: the kernel of csrc/cuda/w4a16."""

from typing import Any

from torch import Tensor

from qload.kernels.cuda import launch
from qload.kernels.cuda.inputs import in_order

MOST_TOKENS = 64


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    if call.bits != 4:
        return f"reads 4 bits, got {call.bits}"
    if call.tokens > MOST_TOKENS:
        return f"takes {MOST_TOKENS} tokens, got {call.tokens}"
    return launch.why_not(call)


def run(call: Any, columns: int = 0, split: int = 0) -> Tensor:
    """y (M, N); a division of 0 is left to the kernel."""
    return launch.launch("w4a16", call, in_order(call), (None,), (call.group,), columns, split)
