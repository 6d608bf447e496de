"""Marlin's orders for 2:4 sparse weights: kept codes, their positions, and their scales.

Two of every four rows of a column are kept. The kept codes (K / 2, N) are in Marlin's order, but with the
columns of a 64-wide tile reversed. The metadata has four bits per four rows, the positions of the two kept
rows, in the load order of sparse tensor cores.

Source: vLLM 0.11.0 and compressed-tensors 0.14.0, bit-equal to both.
"""

from __future__ import annotations

from functools import cache

from qload.errors import ArgumentError, PatternError
from qload.layouts.marlin import BITS
from qload.layouts.packing import Order, Packing
from qload.lazy_torch import Tensor, torch

SCALES_GROUPED = Order("g (nt b j) -> g (nt j b)", b=2, j=4)
# int16 words (K / 16, N), one for 16 rows of a column, in the load order of sparse tensor cores.
METADATA = Order("(ch d) (nb o f s p) -> ch (nb s o p d f)", d=2, o=8, f=2, s=2, p=2)

PAIRS = (4, 8, 9, 12, 13, 14)  # valid metadata fields: two different positions of four, the lower one first
QUAD_ROWS = 4  # two of them are kept
QUADS_PER_WORD = 4  # in an int16 word


@cache
def rows(bits: int) -> Packing:
    """Packing of kept codes (K / 2, N) into words (K / 32, N * bits / 2)."""
    if bits not in BITS:
        raise ArgumentError("bits", "4 or 8, the widths of Marlin's kernels", str(bits))
    if bits == 4:
        pattern = "(kt h t r) (nt c b j) -> kt (nt c t j) (r b h)"
    else:
        pattern = "(kt h t r) (nt c b j) -> kt (nt c t j b) (r h)"
    return Packing(bits, pattern, h=2, t=4, r=2, j=4, b=2, c=8)


def read_positions(meta: Tensor) -> Tensor:
    """Read int16 metadata (K / 32, 2 N): the row within its quad, 0 to 3, of each kept code (K / 2, N)."""
    if meta.dtype != torch.int16:
        raise ArgumentError("meta", "dtype int16", str(meta.dtype).removeprefix("torch."))
    words = METADATA.undo(meta).to(torch.int32)
    fields = torch.stack([(words >> (2 * i)) & 3 for i in range(2 * QUADS_PER_WORD)], dim=1)
    return fields.flatten(0, 1)


def write_positions(positions: Tensor) -> Tensor:
    """Invert `read_positions`."""
    fields = positions.to(torch.int32)
    fields = fields.reshape(
        positions.shape[0] // (2 * QUADS_PER_WORD), 2 * QUADS_PER_WORD, positions.shape[1]
    )
    words = torch.zeros_like(fields[:, 0])
    for i in range(2 * QUADS_PER_WORD):
        words |= fields[:, i] << (2 * i)
    return METADATA.apply(words.to(torch.int16))


def find_invalid_fields(meta: Tensor) -> tuple[int, int, int] | None:
    """Return (first invalid field, number of invalid fields, number of fields) of metadata, or None."""
    fields = torch.stack([(meta.to(torch.int32) >> shift) & 15 for shift in (0, 4, 8, 12)])
    wrong = fields[~torch.isin(fields, torch.tensor(PAIRS, device=meta.device))]
    return (int(wrong[0]), wrong.numel(), fields.numel()) if wrong.numel() else None


def scatter(kept: Tensor, positions: Tensor, fill: int) -> Tensor:
    """Scatter kept codes (K / 2, N) to their rows of (K, N), with `fill` elsewhere."""
    quads, N = kept.shape[0] // 2, kept.shape[1]
    dense = torch.full((quads, QUAD_ROWS, N), fill, dtype=kept.dtype, device=kept.device)
    dense.scatter_(1, positions.reshape(quads, 2, N).long(), kept.reshape(quads, 2, N))
    return dense.reshape(quads * QUAD_ROWS, N)


def choose_positions(present: Tensor) -> Tensor:
    """Positions (K / 2, N) of kept rows for a mask (K, N) of nonzero values, as the owners' packers choose.

    Quads with fewer than two values use fixed positions: (2, 3) for none or one of the last two, (1, 2) for
    the second alone, (0, 2) for the first alone.
    """
    quads = present.reshape(present.shape[0] // QUAD_ROWS, QUAD_ROWS, present.shape[1])
    first, second, third, fourth = quads.unbind(1)
    if bool((quads.sum(1) > 2).any()):
        raise PatternError("2:4", "more than two of four neighbouring rows have a nonzero value")
    low = torch.where(first, 0, torch.where(second, 1, 2))
    other = torch.where(first & second, 1, torch.where(third | ~(first | second) | ~fourth, 2, 3))
    high = torch.where(low == 2, 3, other)
    return torch.stack([low, high], dim=1).flatten(0, 1)


def gather(dense: Tensor, positions: Tensor) -> Tensor:
    """Gather the kept codes (K / 2, N) of codes (K, N)."""
    quads, N = dense.shape[0] // QUAD_ROWS, dense.shape[1]
    kept = dense.reshape(quads, QUAD_ROWS, N).gather(1, positions.reshape(quads, 2, N).long())
    return kept.reshape(2 * quads, N)
