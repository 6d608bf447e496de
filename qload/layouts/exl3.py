"""EXL3's trellises: tiles of 16 x 16 weights, each a ring of bits, and the values of its states.

A tile of k bits per weight is a ring of 256 * k bits: those of little-endian words of 32 bits, highest first.
The state of weight t is the 16 bits that end at bit (t + 1) * k. For k = a + 1/2 even weights add a bits, odd
ones a + 1. The bits of t, highest first, are (column % 8, row % 8 / 2, column / 8, row / 8, row % 2), where
rows are inputs. A codebook maps states to values of float16.

Source: exllamav3 1.6.5, bit-equal to its device functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from qload.lazy_torch import Tensor, torch

Codebook = Literal["3inst", "mcg", "mul1"]
TILE, STATE_BITS = 16, 16  # rows and columns of a tile; bits of a state
MULTIPLIERS: Mapping[str, int] = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
INCREMENT = 64248484  # of 3inst
KEPT, FLIPPED = 0x8FFF8FFF, 0x3B603B60  # bits of two float16 numbers, whose sum is the value
# Of mul1: float16(0x1EEE) * (1024 + sum of bytes) + float16(0xC931), in units of 2**-18.
BYTE_FACTOR, BYTE_OFFSET, BYTE_UNIT = 1774, -1329 << 11, 2.0**-18
HALF_WORD = 0xFFFF


def decode_states(trellis: Tensor, bits: float) -> Tensor:
    """States of all weights: int16 (K / 16, N / 16, 16 * bits) -> int32 (N, K)."""
    k_tiles, n_tiles, width = trellis.shape
    halves = trellis.reshape(k_tiles, n_tiles, width // 2, 2).flip(-1).flatten(-2).to(torch.int32)
    words = halves << STATE_BITS | halves.roll(-1, -1) & HALF_WORD
    weight = torch.arange(TILE * TILE, device=trellis.device)
    ends = (weight + 1) * int(bits) + (weight + 1) // 2 * (bits % 1 != 0)
    starts = (ends - STATE_BITS) % (width * STATE_BITS)
    shift = STATE_BITS - (starts % STATE_BITS).to(torch.int32)
    states = words[..., starts // STATE_BITS] >> shift & HALF_WORD
    fields = states.view(k_tiles, n_tiles, 8, 4, 2, 2, 2)
    return fields.permute(1, 4, 2, 0, 5, 3, 6).reshape(n_tiles * TILE, k_tiles * TILE)


def state_values(codebook: Codebook, device: torch.device) -> Tensor:
    """Value of each state: float32 (65536,). No copy from the host, which a CUDA graph cannot capture."""
    product = torch.arange(1 << STATE_BITS, device=device) * MULTIPLIERS[codebook]
    if codebook == "mul1":
        total = (product[:, None] >> torch.arange(0, 32, 8, device=device) & 0xFF).sum(1)
        return (((1024 + total) * BYTE_FACTOR + BYTE_OFFSET).float() * BYTE_UNIT).half().float()
    both = (product + INCREMENT * (codebook == "3inst")) & KEPT ^ FLIPPED
    low, high = (part.to(torch.int16).view(torch.float16).float() for part in (both, both >> STATE_BITS))
    return (low + high).half().float()
