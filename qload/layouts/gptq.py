"""GPTQ's orders: codes down K, zero points along N, each a plain little-endian stream.

With 2, 4 and 8 bits a word has 32 / bits codes. With 3 bits three words have 32 codes; the 11th and the
22nd straddle two words. Source: gptqmodel 7.7.0.
"""

from functools import cache

from qload.layouts.packing import Packing


@cache
def rows(bits: int) -> Packing:
    """Packing of codes (K, N) into qweight (K * bits / 32, N)."""
    if bits == 3:
        return Packing(3, "(kp i) n -> (kp w) n (i)", i=32, w=3)
    return Packing(bits, "(kp i) n -> kp n (i)", i=32 // bits)


@cache
def columns(bits: int) -> Packing:
    """Packing of zero points (G, N) into qzeros (G, N * bits / 32)."""
    if bits == 3:
        return Packing(3, "g (np i) -> g (np w) (i)", i=32, w=3)
    return Packing(bits, "g (np i) -> g np (i)", i=32 // bits)
