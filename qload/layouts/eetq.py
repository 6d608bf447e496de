"""EETQ's order: 8-bit codes for CUTLASS's mixed-type kernel, two outputs interleaved.

For each 64 inputs, outputs 2i and 2i + 1 follow each other. For each 16 inputs, the rows 2t, 2t + 8, 2t + 1,
2t + 9 are one 32-bit word: the operand of one matrix instruction, with pairs of bytes for pairs of halves. A
byte is the code plus 128.

Source: EETQ 465e972, byte-equal to its own preprocessor; its bytes for sm75 and sm80 are equal. Its layout of
sm70 is different and unsupported; for sm90 and later EETQ itself refuses.
"""

from __future__ import annotations

from qload import devices
from qload.errors import ArgumentError
from qload.layouts.packing import Order, Packing
from qload.lazy_torch import Tensor, torch

BYTES = Order("(np u) (kt x h t r) -> np (kt u x t r h)", u=2, x=4, h=2, t=4, r=2)
WORDS = Packing(8, "(np u) (kt x h t r) -> np (kt u x t) (r h)", u=2, x=4, h=2, t=4, r=2)  # four bytes a word
TILE = 64  # EETQ needs multiples of this for inputs and outputs
ORDERS = {75: BYTES, 80: BYTES, 86: BYTES, 89: BYTES}  # by compute capability


def order(capability: int) -> Order:
    """Order of bytes (N, K) -> (N / 2, 2 * K) by compute capability; ArgumentError for an unknown one."""
    if capability not in ORDERS:
        known = ", ".join(f"sm{each}" for each in ORDERS)
        raise ArgumentError(
            "capability", f"{known}: EETQ writes no bytes for sm90 and later", f"sm{capability}"
        )
    return ORDERS[capability]


def pack(codes: Tensor) -> Tensor:
    """Pack codes (N, K) in [0, 256) into bytes, int8 (K, N): a nominal shape, not that of the order."""
    devices.check_integers(codes)
    devices.check_codes(codes, 8)
    N, K = codes.shape
    return BYTES.apply(codes.to(torch.uint8)).view(torch.int8).reshape(K, N)


def unpack(stored: Tensor) -> Tensor:
    """Invert `pack`: bytes, int8 (K, N) -> codes, uint8 (N, K)."""
    K, N = stored.shape
    return BYTES.undo(stored.contiguous().view(torch.uint8).reshape(N // 2, 2 * K))
