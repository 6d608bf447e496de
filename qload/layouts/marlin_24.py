"""Marlin's orders for 2:4 sparse weights: the kept codes, which of each four they are, and their scales.

Of every four rows of a column two are kept, in order; the kept codes (K / 2, N) lie as Marlin's do, but
the columns of a 64-wide tile run the other way round. The metadata gives four bits to each four rows,
the positions of the two kept ones, and is laid out as the sparse tensor cores load it.

Source: vLLM 0.11.0 and compressed-tensors 0.14.0, bit-equal to both.
"""

from functools import cache

import torch
from torch import Tensor

from qload.errors import ArgumentError, PatternError
from qload.layouts.marlin import BITS
from qload.layouts.packing import Order, Packing

SCALES_GROUPED = Order("g (nt b j) -> g (nt j b)", b=2, j=4)
# int16 words (K / 16, N), one for 16 rows of a column, as the sparse tensor cores load them.
METADATA = Order("(ch d) (nb o f s p) -> ch (nb s o p d f)", d=2, o=8, f=2, s=2, p=2)

PAIRS = (4, 8, 9, 12, 13, 14)  # fields of metadata: two different places of four, the lower one first
QUAD = 4  # rows of which two are kept
QUADS = 4  # quads of an int16 word


@cache
def rows(bits: int) -> Packing:
    """Kept codes (K / 2, N) -> words (K / 32, N * bits / 2)."""
    if bits not in BITS:
        raise ArgumentError("bits", "4 or 8, which Marlin's kernels read", str(bits))
    if bits == 4:
        pattern = "(kt h t r) (nt c b j) -> kt (nt c t j) (r b h)"
    else:
        pattern = "(kt h t r) (nt c b j) -> kt (nt c t j b) (r h)"
    return Packing(bits, pattern, h=2, t=4, r=2, j=4, b=2, c=8)


def read_positions(meta: Tensor) -> Tensor:
    """int16 metadata (K / 32, 2 N) -> the row, 0 to 3 of its quad, of each kept code (K / 2, N)."""
    if meta.dtype != torch.int16:
        raise ArgumentError("meta", "dtype int16", str(meta.dtype).removeprefix("torch."))
    words = METADATA.undo(meta).to(torch.int32)
    fields = torch.stack([(words >> (2 * i)) & 3 for i in range(2 * QUADS)], dim=1)
    return fields.flatten(0, 1)


def write_positions(positions: Tensor) -> Tensor:
    """The inverse of `read_positions`."""
    fields = positions.to(torch.int32)
    fields = fields.reshape(positions.shape[0] // (2 * QUADS), 2 * QUADS, positions.shape[1])
    words = torch.zeros_like(fields[:, 0])
    for i in range(2 * QUADS):
        words |= fields[:, i] << (2 * i)
    return METADATA.apply(words.to(torch.int16))


def invalid(meta: Tensor) -> tuple[int, int, int] | None:
    """(the first field that says no pair of places, how many do, of how many), or None."""
    fields = torch.stack([(meta.to(torch.int32) >> shift) & 15 for shift in (0, 4, 8, 12)])
    wrong = fields[~torch.isin(fields, torch.tensor(PAIRS, device=meta.device))]
    return (int(wrong[0]), wrong.numel(), fields.numel()) if wrong.numel() else None


def spread(kept: Tensor, positions: Tensor, fill: int) -> Tensor:
    """Kept codes (K / 2, N) at their rows of (K, N), `fill` elsewhere."""
    quads, N = kept.shape[0] // 2, kept.shape[1]
    dense = torch.full((quads, QUAD, N), fill, dtype=kept.dtype, device=kept.device)
    dense.scatter_(1, positions.reshape(quads, 2, N).long(), kept.reshape(quads, 2, N))
    return dense.reshape(quads * QUAD, N)


def choose(present: Tensor) -> Tensor:
    """Which rows of (K, N) hold a value -> the positions that the owners' packers keep, (K / 2, N).

    Where a quad holds fewer than two, they fill up from fixed places: none or only one of the last two
    are kept as (2, 3), the second alone as (1, 2), the first alone as (0, 2).
    """
    quads = present.reshape(present.shape[0] // QUAD, QUAD, present.shape[1])
    first, second, third, fourth = quads.unbind(1)
    if bool((quads.sum(1) > 2).any()):
        raise PatternError("2:4", "more than two of four neighbouring rows hold a value")
    low = torch.where(first, 0, torch.where(second, 1, 2))
    other = torch.where(first & second, 1, torch.where(third | ~(first | second) | ~fourth, 2, 3))
    high = torch.where(low == 2, 3, other)
    return torch.stack([low, high], dim=1).flatten(0, 1)


def gather(dense: Tensor, positions: Tensor) -> Tensor:
    """Codes (K, N) -> the kept ones (K / 2, N)."""
    quads, N = dense.shape[0] // QUAD, dense.shape[1]
    kept = dense.reshape(quads, QUAD, N).gather(1, positions.reshape(quads, 2, N).long())
    return kept.reshape(2 * quads, N)
