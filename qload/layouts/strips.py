"""Strips: our own order, 64 columns with all of their rows in one piece.

A warp's unit is 128 rows of 64 columns, 4 or 8 KB that follow each other in memory; a lane's 16 bytes are
operands of a matrix instruction as they lie, as in Marlin's order. But the rows of a lane are eight
neighbours of 32, so that for few tokens it loads activations as they are, without shared memory. A word has
two of these neighbours, of 4 bits also the same two 32 rows on: of eight rows in the order of activations, as
for many tokens they lie in shared memory, each lane of four needs just these two. Of two columns 8 apart a
word holds neighbouring fields: of 4 bits one mask each gives them, the second 16 times too large, for which
its scale makes up.

Scales and zero points are in Marlin's orders.
"""

from functools import cache

from qload.errors import ArgumentError
from qload.layouts.packing import Packing

TILE_K, TILE_N = 128, 64
BITS = (4, 8)


@cache
def rows(bits: int) -> Packing:
    """Codes (K, N) -> words (N / 64, K * bits * 2)."""
    if bits not in BITS:
        raise ArgumentError("bits", "4 or 8, which strips hold", str(bits))
    if bits == 4:
        pattern = "(kt e i t u r) (nt j b c) -> nt (kt e j c t u) (r i b)"
        return Packing(4, pattern, e=2, i=2, t=4, u=4, r=2, j=4, b=2, c=8)
    pattern = "(kt i t u r) (nt j b c) -> nt (kt i j c t u) (r b)"
    return Packing(8, pattern, i=4, t=4, u=4, r=2, j=4, b=2, c=8)
