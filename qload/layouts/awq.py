"""AWQ's GEMM order: codes and zero points along N, the even columns of a word's eight before the odd.

Nibble i of word c holds column 8c + [0, 2, 4, 6, 1, 3, 5, 7][i]; with 8 bits byte i holds column
4c + [0, 2, 1, 3][i]. Source: autoawq 0.2.9.
"""

from functools import cache

from qload.layouts.packing import Packing


@cache
def columns(bits: int) -> Packing:
    """Packing of codes (K, N) into qweight (K, N * bits / 32), and of zero points likewise."""
    return Packing(bits, "k (c j r) -> k c (r j)", r=2, j=16 // bits)
