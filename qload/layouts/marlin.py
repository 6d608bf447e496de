"""Marlin's tensor-core orders, in tiles of 16 rows and 64 columns.

For each 16 x 16 block a lane has rows 2t, 2t + 1, 2t + 8, 2t + 9 of two columns 8 apart: the operand of one
matrix instruction. Within a word the rows 8 apart are neighbours; one mask and one shift give both halves of
a register. Scales are permuted for one load per lane: eight columns 8 apart with groups, pairs of columns
with one scale per column.
In one-byte scales the middle two of every four columns are swapped. In vLLM 0.11 two groups of them share a
row: eight columns of a lane from the first group, then from the second. In vLLM 0.33 each group has a row.

Source: IST's packer 2f6d7c1, vLLM 0.11.0 and 0.33.0, and TGI db931fcf, byte-equal to all.
"""

from functools import cache

from qload.errors import ArgumentError
from qload.layouts.packing import Order, Packing

TILE_K, TILE_N = 16, 64
BITS = (4, 8)

SCALES_GROUPED = Order("g (nt j c) -> g (nt c j)", j=8, c=8)
SCALES_PER_COLUMN = Order("g (nt j t r) -> g (nt t j r)", j=4, t=4, r=2)
SCALES_OF_A_BYTE = Order("g (nt a b d c) -> g (nt c a d b)", a=2, b=2, d=2, c=8)
SCALES_OF_A_BYTE_PAIRED = Order("(gp h) (nt a b d c) -> gp (nt c h a d b)", h=2, a=2, b=2, d=2, c=8)
BIAS = Order("(nt j t r) -> (nt t j r)", j=4, t=4, r=2)


@cache
def rows(bits: int) -> Packing:
    """Packing of codes (K, N) into words (K / 16, N * bits / 2)."""
    _check(bits)
    if bits == 4:
        pattern = "(kt h t r) (nt j b c) -> kt (nt c t j) (r b h)"
    else:
        pattern = "(kt h t r) (nt j b c) -> kt (nt c t j b) (r h)"
    return Packing(bits, pattern, h=2, t=4, r=2, j=4, b=2, c=8)


@cache
def zeros(bits: int) -> Packing:
    """Packing of zero points (G, N) into words (G, N * bits / 32): always the grouped order."""
    _check(bits)
    if bits == 4:
        return Packing(4, "g (nt j r u) -> g (nt u) (r j)", j=4, r=2, u=8)
    return Packing(8, "g (nt x j r u) -> g (nt u x) (r j)", x=2, j=2, r=2, u=8)


def scales(groups: int) -> Order:
    """Order of scales (G, N); the kernel reads a single row as one scale per column."""
    return SCALES_GROUPED if groups > 1 else SCALES_PER_COLUMN


def _check(bits: int) -> None:
    if bits not in BITS:
        raise ArgumentError("bits", "4 or 8, the widths of Marlin's kernels", str(bits))
