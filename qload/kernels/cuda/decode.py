"""Up to 16 tokens times 4 or 8 bits in Marlin's order, or 24 in strips: the kernel of csrc/cuda/decode.

It could read x out of order, but takes longer for that than a kernel that puts x in order, of one token too.
"""

from typing import Any

from torch import Tensor

from qload.kernels.cuda import launch
from qload.kernels.cuda.inputs import in_order

MOST_TOKENS = {"marlin": 16, "strips": 24}  # by layout


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    most = MOST_TOKENS[call.layout]
    if call.tokens > most:
        return f"takes {most} tokens, got {call.tokens}"
    return launch.why_not(call, looks_up=True)


def run(call: Any, columns: int = 0, split: int = 0) -> Tensor:
    """y (M, N); a division of 0 is left to the kernel."""
    indices = None if call.is_k_full else call.g_idx, None
    kind = call.bits, call.group, call.layout == "strips"
    return launch.launch("decode", call, in_order(call), indices, kind, columns, split)
