"""Panels: qload's order for CPUs, 16 columns with all of their rows contiguous.

A word has 32 / bits rows of one column, the first in the low bits. 16 words of 16 columns are contiguous:
64 bytes, one cache line and two AVX2 registers. The lanes of a register are columns, and sums need no
reduction across lanes. An input is one scalar for all lanes. A panel is read sequentially. Groups of any
size, zero points and act order are free, because all columns change their group at the same row.

Scales and zero points of a panel are contiguous too, 16 for each group.
"""

from functools import cache

from qload.errors import ArgumentError
from qload.layouts.packing import Order, Packing

TILE_N = 16
BITS = (4, 8)

SCALES = Order("g (nt c) -> nt (g c)", c=16)


@cache
def rows(bits: int) -> Packing:
    """Packing of codes (K, N) into words (N / 16, K * bits / 2)."""
    if bits not in BITS:
        raise ArgumentError("bits", "4 or 8, the widths of panels", str(bits))
    return Packing(bits, "(kt r) (nt c) -> nt (kt c) (r)", r=32 // bits, c=16)
