"""Up to 16 tokens times 4 or 8 bits in Marlin's order or in strips: the kernel of csrc/cuda/decode."""

from typing import Any

from torch import Tensor

from qload.kernels.cuda import launch

MOST_TOKENS = 16


def why_not(call: Any) -> str | None:
    """Why this kernel does not take a call, or None."""
    if call.tokens > MOST_TOKENS:
        return f"takes {MOST_TOKENS} tokens, got {call.tokens}"
    return launch.why_not(call, looks_up=True)


def run(call: Any, columns: int = 0, split: int = 0) -> Tensor:
    """y (M, N); a division of 0 is left to the kernel."""
    indices = None if call.is_k_full else call.g_idx, call.perm
    kind = call.bits, call.group, call.layout == "strips"
    return launch.launch("decode", call, call.x, indices, kind, columns, split)
