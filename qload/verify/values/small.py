"""The same of tensors of one small piece, of which a model can have a hundred thousand.

Torch takes a few microseconds for an operation, numpy a tenth of that: where there is little to compute,
that is all the time there is. What is found is what `contents` and `numbers` find.
"""

from functools import cache
from hashlib import blake2b
from math import inf, nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qload.verify.values.contents import ONES, WORDS, Contents, ContentsOf, Repeats, Run
from qload.verify.values.numbers import DRAWN, EIGHT_BITS, NOT_A_NUMBER, OTHER, SHARES, Numbers, NumbersOf
from qload.verify.values.pieces import BLOCK

SMALL = 1 << 16  # bytes of a tensor
WIDE = (torch.float16, torch.bfloat16, torch.float32)

Bytes = NDArray[np.uint8]
Sums = NDArray[np.int64]
Floats = NDArray[np.float32]


def small_contents(piece: Tensor) -> Contents:
    """What all bytes of a tensor, in one dimension and not empty, are."""
    data: Bytes = piece.view(torch.uint8).numpy()
    blocks = len(data) // BLOCK
    words = data[: blocks * BLOCK].view(np.int64).reshape(blocks, WORDS)
    sums, first = words.sum(1), words[:, 0]
    if data[0] == data[-1] and bool((data == data[0]).all()):
        return _constant(data, sums)
    if not bool(((sums == first * WORDS) & (first == words[:, -1])).any()):
        word = None if blocks else _word(data)
        return Contents(len(data), _digest(data, sums), word, None, (), _repeats(sums))
    streamed = ContentsOf()  # some blocks repeat a word
    streamed.add(piece)
    return streamed.finish()


def _digest(data: Bytes, sums: Sums) -> bytes:
    digest = blake2b(sums.tobytes(), digest_size=16)
    digest.update(data[len(sums) * BLOCK :].tobytes())
    return digest.digest()


def _constant(data: Bytes, sums: Sums) -> Contents:
    """Of bytes that are all one."""
    byte = int(data[0])
    word = byte * ONES - (byte > 127) * 2**64 if len(data) >= 16 else None
    runs = (Run(0, len(data), byte),) if len(sums) else ()
    return Contents(len(data), _digest(data, sums), word, byte, runs, None)


def _word(data: Bytes) -> int | None:
    """The word that less than a block repeats; None where it is not one, or too short to be sure."""
    if len(data) < 16 or not bool((data[8:] == data[:-8]).all()):
        return None
    return int(data[:8].view(np.int64)[0])


def _repeats(sums: Sums) -> Repeats | None:
    """Blocks whose sums are equal, and not zero."""
    place = sums.argsort(kind="stable")
    ordered = sums[place]
    same = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
    count = int(same.sum())
    if not count:
        return None
    again, first = place[1:][same], place[:-1][same]
    pick = int(again.argmin())
    return Repeats(count, len(sums), int(first[pick]) * BLOCK, int(again[pick]) * BLOCK)


def small_numbers(piece: Tensor, *, exponents: bool, fully: bool) -> Numbers:
    """What all floats of a tensor, in one dimension and not empty, are; see `NumbersOf`."""
    eight = piece.dtype in EIGHT_BITS
    if exponents or not (eight or piece.dtype in WIDE):
        streamed = NumbersOf(exponents=exponents, fully=fully)
        streamed.add(piece)
        return streamed.finish()
    drawn, other = piece[:: max(1, len(piece) // DRAWN)], OTHER.get(piece.dtype)
    values = _floats(drawn if eight and not fully else piece)
    low, high = _ends(piece) if eight else (float(values.min()), float(values.max()))
    retyped = (0.0, 0.0, 0.0) if other is None else _quantiles(_floats(drawn.view(other)))
    least, zeros = _least(values) if fully else (inf, 0)
    return Numbers(low, high, _quantiles(_floats(drawn)), len(piece), retyped, least, zeros)


def _least(values: Floats) -> tuple[float, int]:
    """The smallest magnitude but zero, and how many are zero."""
    sizes = np.abs(values)
    told = sizes[(sizes > 0) & np.isfinite(sizes)]
    return float(told.min()) if len(told) else inf, int((sizes == 0).sum())


def _quantiles(values: Floats) -> tuple[float, float, float]:
    sizes = np.abs(values)
    sizes = np.sort(sizes[(sizes > 0) & np.isfinite(sizes)])
    if not len(sizes):
        return 0.0, 0.0, 0.0
    low, middle, high = (float(sizes[int(share * (len(sizes) - 1))]) for share in SHARES)
    return low, middle, high


def _floats(piece: Tensor) -> Floats:
    if piece.dtype in EIGHT_BITS:
        found: Floats = _table(piece.dtype)[piece.view(torch.uint8).numpy()]
        return found
    wide: Floats = piece.float().numpy()
    return wide


def _ends(piece: Tensor) -> tuple[float, float]:
    """The range of bytes that are floats; its ends are the magnitudes of both signs together."""
    bits, values = piece.view(torch.uint8).numpy(), _table(piece.dtype)
    if piece.dtype in NOT_A_NUMBER and bool((bits == NOT_A_NUMBER[piece.dtype]).any()):
        return nan, nan
    size, signed = int((bits & 127).max()), float(values[bits.max()])
    return min(signed, 0.0) if size else 0.0, float(values[size])


@cache
def _table(dtype: torch.dtype) -> Floats:
    values: Floats = torch.arange(256).to(torch.uint8).view(dtype).float().numpy()
    return values
