"""Up to 16 tokens times 4 or 8 bits in Marlin's order, or 24 in strips: the kernel of csrc/cuda/decode."""

from typing import Any

from torch import Tensor

from qload.kernels.cuda import inputs, launch

MOST_TOKENS = {"marlin": 16, "strips": 24}  # by layout


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    most = MOST_TOKENS[call.layout]
    if call.tokens > most:
        return f"takes {most} tokens, got {call.tokens}"
    return launch.why_not(call, looks_up=True)


def run(call: Any, columns: int = 0, split: int = 0) -> Tensor:
    """y (M, N); a division of 0 is left to the kernel."""
    x, perm = inputs.ahead(call)
    indices = None if call.is_k_full else call.g_idx, perm
    kind = call.bits, call.group, call.layout == "strips"
    return launch.launch("decode", call, x, indices, kind, columns, split)
