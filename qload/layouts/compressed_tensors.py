"""compressed-tensors' order: unsigned codes along the last axis, in one of two packings.

    dense     a little-endian stream; codes of 3, 5, 6 and 7 bits straddle words
    by words  32 // bits codes per word, its remaining upper bits unused; up to version 0.17

With 2, 4 and 8 bits both are equal. The last word of a row may be partly filled. Signed codes are stored
with 2**(bits - 1) added. Source: compressed-tensors 0.14.0 and 0.20.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd

from qload.errors import MismatchError
from qload.layouts.packing import ClippedCodes, PackedCodes, Packing
from qload.lazy_torch import Tensor, torch
from qload.sentences import WORD_BITS, CodeField

BITS = (2, 3, 4, 5, 6, 7, 8)
DECIDING_KEY = "the version of compressed-tensors in the config: before 0.18, or 0.18 and later"


@cache
def rows(bits: int, dense: bool) -> Packing:
    """Packing of codes (R, C) into words, for C in whole runs."""
    if dense:
        common = gcd(bits, WORD_BITS)
        return Packing(bits, "r (cp i) -> r (cp w) (i)", i=WORD_BITS // common, w=bits // common)
    run = WORD_BITS // bits
    fields = tuple(CodeField(i, 0, bits, 0, i * bits) for i in range(run))
    return Packing(bits, "r (cp i) -> r cp (i)", fields=fields, i=run)


def stored(dim: str, bits: int, dense: bool) -> str:
    """Axis text of the words of a packed dimension."""
    return f"{dim}*{bits}/{WORD_BITS}^" if dense else f"{dim}/{WORD_BITS // bits}^"


def words(count: int, bits: int, dense: bool) -> int:
    """Number of words for `count` codes."""
    return -(-count * bits // WORD_BITS) if dense else -(-count // (WORD_BITS // bits))


def has_unused_bits(count: int, bits: int, dense: bool) -> bool:
    """Return True if the words of `count` codes have bits without a code."""
    return words(count, bits, dense) * WORD_BITS != count * bits


def capacity(words: int, bits: int, dense: bool) -> int:
    """Largest number of codes in so many `words`."""
    return words * WORD_BITS // bits if dense else words * (WORD_BITS // bits)


def packings_agree(count: int, bits: int) -> bool:
    """Return whether both packings of `count` codes are equal."""
    return WORD_BITS % bits == 0 or count <= WORD_BITS // bits


def is_dense(name: str, counts: Sequence[tuple[int, int]], bits: int, claimed: bool | None) -> bool:
    """Return whether the tensor `name` is packed densely, by `counts` of (codes, words) or else as `claimed`.

    MismatchError if both packings fit and the config claims neither.
    """
    if all(packings_agree(count, bits) for count, _ in counts):
        return True
    fitting = [d for d in (True, False) if all(words(count, bits, d) == w for count, w in counts)]
    if len(fitting) == 2:
        if claimed is None:
            raise MismatchError(name, f"two packings of {bits} bits fit its shape", DECIDING_KEY, "none")
        return claimed
    return fitting[0] if fitting else claimed is not False


def unpack(tensor: Tensor, count: int, bits: int, dense: bool) -> Tensor:
    """Unpack int32 words (R, W) to the first `count` codes of each row, int32 (R, count)."""
    packing = rows(bits, dense)
    return packing.unpack(torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % packing.words)))[
        :, :count
    ].contiguous()


def packed_codes(tensor: Tensor, count: int, bits: int, dense: bool) -> PackedCodes | ClippedCodes:
    """The codes of `unpack`, still packed."""
    packing = rows(bits, dense)
    short = -tensor.shape[-1] % packing.words
    packed = packing.packed(torch.nn.functional.pad(tensor, (0, short)) if short else tensor)
    R, C = packed.shape
    return packed if count == C else ClippedCodes(packed, (R, count))


def pack(codes: Tensor, bits: int, dense: bool) -> Tensor:
    """Invert `unpack`; unused fields are 0."""
    packing, count = rows(bits, dense), codes.shape[-1]
    full = packing.pack(torch.nn.functional.pad(codes, (0, -count % packing.granule(1))))
    return full[:, : words(count, bits, dense)].contiguous()
