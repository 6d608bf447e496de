"""compressed-tensors' order: unsigned codes along the last axis, in one of two packings.

    dense     a little-endian stream; codes of 3, 5, 6 and 7 bits straddle words
    by words  32 // bits codes a word, what is left of its upper bits unused; up to version 0.17

With 2, 4 and 8 bits both are the same. The last word of a row may be short of codes. Signed codes are stored
with 2**(bits - 1) added. Source: compressed-tensors 0.14.0 and 0.20.0.
"""

from collections.abc import Sequence
from functools import cache
from math import gcd

from torch import Tensor
from torch.nn.functional import pad

from qload.errors import MismatchError
from qload.layouts.packing import ClippedCodes, PackedCodes, Packing
from qload.sentences import WORD_BITS, CodeField

BITS = (2, 3, 4, 5, 6, 7, 8)
SINCE = (
    "the version of compressed-tensors in the config: before 0.18, or from it on"  # what tells packings apart
)


@cache
def rows(bits: int, dense: bool) -> Packing:
    """Codes (R, C) -> words, for C in whole runs."""
    if dense:
        common = gcd(bits, WORD_BITS)
        return Packing(bits, "r (cp i) -> r (cp w) (i)", i=WORD_BITS // common, w=bits // common)
    run = WORD_BITS // bits
    fields = tuple(CodeField(i, 0, bits, 0, i * bits) for i in range(run))
    return Packing(bits, "r (cp i) -> r cp (i)", fields=fields, i=run)


def stored(dim: str, bits: int, dense: bool) -> str:
    """The axis of words that a dimension is packed along."""
    return f"{dim}*{bits}/{WORD_BITS}^" if dense else f"{dim}/{WORD_BITS // bits}^"


def words(count: int, bits: int, dense: bool) -> int:
    """How many words that many codes fill."""
    return -(-count * bits // WORD_BITS) if dense else -(-count // (WORD_BITS // bits))


def most(words: int, bits: int, dense: bool) -> int:
    """How many codes that many words can hold."""
    return words * WORD_BITS // bits if dense else words * (WORD_BITS // bits)


def alike(count: int, bits: int) -> bool:
    """Whether both packings lay that many codes out the same way."""
    return WORD_BITS % bits == 0 or count <= WORD_BITS // bits


def told(name: str, counts: Sequence[tuple[int, int]], bits: int, said: bool | None) -> bool:
    """Whether (codes, words) of the tensor `name` are dense, as `said` where both packings fit.

    MismatchError where both fit and nothing is said.
    """
    if all(alike(count, bits) for count, _ in counts):
        return True
    fitting = [d for d in (True, False) if all(words(count, bits, d) == w for count, w in counts)]
    if len(fitting) == 2:
        if said is None:
            raise MismatchError(name, f"two packings of {bits} bits fit its shape", SINCE, "none")
        return said
    return fitting[0] if fitting else said is not False


def unpack(tensor: Tensor, count: int, bits: int, dense: bool) -> Tensor:
    """int32 words (R, W) -> the first `count` codes of each row (R, count), int32."""
    packing = rows(bits, dense)
    return packing.unpack(pad(tensor, (0, -tensor.shape[-1] % packing.words)))[:, :count].contiguous()


def held(tensor: Tensor, count: int, bits: int, dense: bool) -> PackedCodes | ClippedCodes:
    """What `unpack` says, still packed."""
    packing = rows(bits, dense)
    short = -tensor.shape[-1] % packing.words
    packed = packing.packed(pad(tensor, (0, short)) if short else tensor)
    R, C = packed.shape
    return packed if count == C else ClippedCodes(packed, (R, count))


def pack(codes: Tensor, bits: int, dense: bool) -> Tensor:
    """The inverse of `unpack`; places without a code hold 0."""
    packing, count = rows(bits, dense), codes.shape[-1]
    full = packing.pack(pad(codes, (0, -count % packing.granule(1))))
    return full[:, : words(count, bits, dense)].contiguous()
