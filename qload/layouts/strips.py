"""Strips: qload's CUDA order, 64 columns with all of their rows contiguous.

The unit of a warp is 128 rows of 64 columns, 4 or 8 KB of contiguous memory. The 16 bytes of a lane are
operands of a matrix instruction, as in Marlin's order. Unlike Marlin's, the rows of a lane are eight
neighbours of 32; for few tokens the lane loads activations from global memory without a shuffle. A word has
two of these neighbours, and with 4 bits the same two 32 rows later: for many tokens each lane of four needs
just these two of eight rows in shared memory. Two columns 8 apart are neighbouring fields of a word. With 4
bits one mask each extracts them; the second is 16 times too large, and its scale compensates.

Scales and zero points are in Marlin's orders. Scales of 4-bit numbers, such as FP4 and nf4, are contiguous
for each unit of a warp instead. A lane loads those of its columns c and c + 8 at once: two scales for each
group. With groups of 16, those of the first halves of 32 rows come first.
"""

from functools import cache

from qload.errors import ArgumentError
from qload.layouts.packing import Order, Packing

TILE_K, TILE_N = 128, 64
BITS = (4, 8)
NUMBER_GROUPS = (16, 32, 64, 128)  # rows of a scale of 4-bit numbers


@cache
def rows(bits: int) -> Packing:
    """Packing of codes (K, N) into words (N / 64, K * bits * 2)."""
    if bits not in BITS:
        raise ArgumentError("bits", "4 or 8, the widths of strips", str(bits))
    if bits == 4:
        pattern = "(kt e i t u r) (nt j b c) -> nt (kt e j c t u) (r i b)"
        return Packing(4, pattern, e=2, i=2, t=4, u=4, r=2, j=4, b=2, c=8)
    pattern = "(kt i t u r) (nt j b c) -> nt (kt i j c t u) (r b)"
    return Packing(8, pattern, i=4, t=4, u=4, r=2, j=4, b=2, c=8)


@cache
def group_scales(group_size: int) -> Order:
    """Order of scales (G, N) of 4-bit numbers: (K / 128, N * 128 / group_size)."""
    if group_size == 16:
        return Order("(kt s h) (nt j b c) -> kt (nt j c h s b)", s=4, h=2, j=4, b=2, c=8)
    if group_size in NUMBER_GROUPS:
        return Order("(kt s) (nt j b c) -> kt (nt j c s b)", s=TILE_K // group_size, j=4, b=2, c=8)
    raise ArgumentError("group_size", "16, 32, 64 or 128, the groups of 4-bit numbers", str(group_size))
