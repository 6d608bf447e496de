"""EETQ's bytes: 8-bit codes as CUTLASS's mixed-type kernel reads them, two outputs side by side.

Of a column of 64 inputs, outputs 2i and 2i + 1 lie one after the other; of 16 inputs, the rows 2t, 2t + 8,
2t + 1, 2t + 9 are one 32-bit word, so that a lane has what one matrix instruction takes and pairs of bytes
become pairs of halves. A byte is the code plus 128.

Source: EETQ 465e972, byte-equal to its own preprocessor, whose bytes for sm75 and sm80 are the same.
What it writes on sm70 is another layout that no case shows, and from sm90 on it refuses to write.
"""

import torch
from torch import Tensor

from qload import devices
from qload.errors import ArgumentError
from qload.layouts.packing import Order, Packing

BYTES = Order("(np u) (kt x h t r) -> np (kt u x t r h)", u=2, x=4, h=2, t=4, r=2)
WORDS = Packing(8, "(np u) (kt x h t r) -> np (kt u x t) (r h)", u=2, x=4, h=2, t=4, r=2)  # four bytes a word
TILE = 64  # EETQ takes multiples of this of both inputs and outputs
ORDERS = {75: BYTES, 80: BYTES, 86: BYTES, 89: BYTES}  # by compute capability


def order(capability: int) -> Order:
    """The order of bytes (N, K) -> (N / 2, 2 * K) for a GPU, by its compute capability; ArgumentError."""
    if capability not in ORDERS:
        known = ", ".join(f"sm{each}" for each in ORDERS)
        raise ArgumentError(
            "capability", f"{known}: EETQ writes no bytes for sm90 and later", f"sm{capability}"
        )
    return ORDERS[capability]


def pack(codes: Tensor) -> Tensor:
    """Codes (N, K) in [0, 256) -> bytes, int8 (K, N), whose shape says nothing of where they lie."""
    devices.check_integers(codes)
    devices.check_codes(codes, 8)
    N, K = codes.shape
    return BYTES.apply(codes.to(torch.uint8)).view(torch.int8).reshape(K, N)


def unpack(stored: Tensor) -> Tensor:
    """The inverse of `pack`: bytes, int8 (K, N) -> codes uint8 (N, K)."""
    K, N = stored.shape
    return BYTES.undo(stored.contiguous().view(torch.uint8).reshape(N // 2, 2 * K))
