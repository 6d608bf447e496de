"""GPTQ's orders: codes down K, zero points along N, each a plain little-endian stream.

2, 4 and 8 bits fill a word with 32 / bits codes; 3 bits fill three words with 32 codes, of which
the 11th and the 22nd straddle two words. Source: gptqmodel 7.7.0.
"""

from functools import cache

from qload.layouts.packing import Packing


@cache
def rows(bits: int) -> Packing:
    """Codes (K, N) -> qweight (K * bits / 32, N)."""
    if bits == 3:
        return Packing(3, "(kp i) n -> (kp w) n (i)", i=32, w=3)
    return Packing(bits, "(kp i) n -> kp n (i)", i=32 // bits)


@cache
def columns(bits: int) -> Packing:
    """Zero points (G, N) -> qzeros (G, N * bits / 32)."""
    if bits == 3:
        return Packing(3, "g (np i) -> g (np w) (i)", i=32, w=3)
    return Packing(bits, "g (np i) -> g np (i)", i=32 // bits)
