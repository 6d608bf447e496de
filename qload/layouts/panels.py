"""Panels: our own order for CPUs, 16 columns with all of their rows in one piece.

A word has as many rows of a column as it holds codes, the first in the low bits, and 16 such words of 16
columns follow each other: 64 bytes, a line of the cache and two registers of AVX2. So the lanes of a register
are columns, whose sums need no adding up across lanes; an input is one number for all lanes; and a panel is
read from its first byte to its last, as memory likes it. Groups of any size, zero points and act order cost
nothing in between, as all columns change their group at the same row.

Scales and zero points of a panel follow each other alike, 16 of each group.
"""

from functools import cache

from qload.errors import ArgumentError
from qload.layouts.packing import Order, Packing

TILE_N = 16
BITS = (4, 8)

SCALES = Order("g (nt c) -> nt (g c)", c=16)


@cache
def rows(bits: int) -> Packing:
    """Codes (K, N) -> words (N / 16, K * bits / 2)."""
    if bits not in BITS:
        raise ArgumentError("bits", "4 or 8, which panels hold", str(bits))
    return Packing(bits, "(kt r) (nt c) -> nt (kt c) (r)", r=32 // bits, c=16)
