"""Bytes and floats of tensors, piece by piece: digests, constants, runs, repeated blocks, and ranges.

Bytes are summed in blocks of 256. Blocks with a sum of 32 times their first word, as sums of equal words are,
get a second look. Ranges of floats cover all values and are NaN if a value is; quantiles use a few values of
each piece, in even steps. Small tensors of one piece take numpy with equal results: torch needs a few
microseconds for an operation, numpy a tenth of that, and a model can have a hundred thousand small tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from math import inf, isfinite, isnan, nan

import numpy as np
from numpy.typing import NDArray

from qload import dtypes
from qload.dtypes import STORED, TORCH
from qload.formats.unquantized import FLOATS
from qload.lazy_torch import Tensor, torch
from qload.verify.blocks import BLOCK_BYTES

BLOCK_WORDS = BLOCK_BYTES // 8
MAX_RUNS = 8  # the longest runs of a tensor
WINDOW_BLOCKS = 1 << 18  # blocks of a search for repeated ones: 64 MiB, with 2 MiB of sums in memory
BYTE_TO_WORD = 0x0101010101010101  # times a byte: a word of it, apart from the sign

DRAWN_VALUES = 512  # values of a piece for quantiles
QUANTILES = (0.05, 0.5, 0.95)
NAN_BYTE = {
    dtypes.float8_e4m3fnuz: 0x80,
    dtypes.float8_e5m2fnuz: 0x80,
}  # types with the sign bit alone as NaN
OTHER_TYPE = {dtypes.float16: dtypes.bfloat16, dtypes.bfloat16: dtypes.float16}
EIGHT_BITS = (dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.float8_e4m3fnuz, dtypes.float8_e5m2fnuz)

MAX_SMALL_BYTES = 1 << 16  # of a small tensor
WIDE = (dtypes.float16, dtypes.bfloat16, dtypes.float32)

Bytes = NDArray[np.uint8]
Sums = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Run:
    """Run of equal bytes: place of the first, number, and value."""

    first: int
    length: int
    byte: int


@dataclass(frozen=True, slots=True)
class Repeats:
    """Repeated blocks: their number, of all `blocks`, and the places of the first pair."""

    count: int
    blocks: int
    first: int
    again: int


@dataclass(frozen=True, slots=True)
class Contents:
    """Bytes of a tensor.

    Attributes
    ----------
    nbytes
        Number of bytes.
    digest
        Digest of the bytes, equal for equal bytes.
    word
        The 64-bit word that the tensor repeats, or None.
    byte
        The byte that the tensor repeats, or None.
    runs
        The longest runs of at least a block.
    repeats
        Repeated blocks, or None.
    """

    nbytes: int
    digest: bytes
    word: int | None
    byte: int | None
    runs: tuple[Run, ...]
    repeats: Repeats | None


class ContentsAccumulator:
    """Accumulator of a tensor's bytes, piece by piece in the order of the file."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._last = torch.empty(0, dtype=torch.uint8)  # the previous block
        self._words: set[int] = set()  # words of constant blocks; two show that the tensor is not constant
        self._even, self._blocks, self._in_window = True, 0, 0
        self._runs: list[Run] = []
        self._open: Run | None = None  # a run up to the end of the last piece
        self._sums: list[Tensor] = []
        self._repeats: Repeats | None = None

    def add(self, piece: Tensor) -> None:
        """Add the next piece."""
        data = piece.view(torch.uint8)
        if len(self._rest):
            data = torch.cat([self._rest, data])
        count = len(data) // BLOCK_BYTES
        self._rest = data[count * BLOCK_BYTES :].clone()
        if count:
            self._add(data[: count * BLOCK_BYTES])

    def _add(self, data: Tensor) -> None:
        words = data.view(torch.int64).view(-1, BLOCK_WORDS)
        sums, first = words.sum(1), words[:, 0]
        self._hash.update(sums.numpy().data)
        even = (sums == first * BLOCK_WORDS) & (first == words[:, -1])
        if bool(even.any()):
            at = even.nonzero().flatten()
            even[at] = (words[at] == first[at, None]).all(1)
        self._even = self._even and bool(even.all())
        if self._even and len(self._words) < 2:
            self._words.update(torch.unique(first).tolist()[:2])
        self._follow(data, first, even)
        self._sums.append(torch.where(even, 0, sums))
        self._blocks += len(sums)
        self._last = data[-BLOCK_BYTES:].clone()
        self._in_window += len(sums)
        if self._in_window >= WINDOW_BLOCKS:
            self._compare()

    def _follow(self, data: Tensor, first: Tensor, even: Tensor) -> None:
        """Extend runs of equal bytes by constant blocks, and by bytes of their neighbours."""
        byte = torch.where(even & (first == (first & 255) * BYTE_TO_WORD), first & 255, -1)
        consecutive = torch.unique_consecutive(byte, return_counts=True)
        values, counts = (part.tolist() for part in consecutive)
        at, base = 0, self._blocks * BLOCK_BYTES
        for value, count in zip(values, counts, strict=True):
            if value >= 0:
                self._begin(data, at * BLOCK_BYTES, base, value, count * BLOCK_BYTES)
            elif self._open is not None:
                self._close(data[at * BLOCK_BYTES : at * BLOCK_BYTES + BLOCK_BYTES])
            at += count

    def _begin(self, data: Tensor, at: int, base: int, value: int, length: int) -> None:
        if self._open is not None and self._open.byte == value:
            self._open = Run(self._open.first, self._open.length + length, value)
            return
        if self._open is not None:
            self._close(data[:0])
        before = data[at - BLOCK_BYTES : at] if at else self._last
        ahead = _leading(before.flip(0), value)
        self._open = Run(base + at - ahead, length + ahead, value)

    def _close(self, following: Tensor) -> None:
        assert self._open is not None
        more = _leading(following, self._open.byte)
        self._runs.append(Run(self._open.first, self._open.length + more, self._open.byte))
        self._runs = sorted(self._runs, key=lambda run: -run.length)[:MAX_RUNS]
        self._open = None

    def _compare(self) -> None:
        """Search this window for blocks with equal sums, apart from blocks of one repeated word."""
        sums = torch.cat(self._sums)
        base = (self._blocks - len(sums)) * BLOCK_BYTES
        self._sums, self._in_window = [], 0
        ordered, place = sums.sort(stable=True)
        same = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
        count = int(same.sum())
        if count and self._repeats is None:
            again, first = place[1:][same], place[:-1][same]
            pick = int(again.argmin())
            earlier, later = int(first[pick]), int(again[pick])
            self._repeats = Repeats(count, 0, base + earlier * BLOCK_BYTES, base + later * BLOCK_BYTES)

    def finish(self) -> Contents:
        """Return the contents of all pieces."""
        if self._open is not None:
            self._close(self._rest)
        if self._sums:
            self._compare()
        self._hash.update(self._rest.numpy().data)
        nbytes = self._blocks * BLOCK_BYTES + len(self._rest)
        first = self._repeats
        repeats = None if first is None else Repeats(first.count, self._blocks, first.first, first.again)
        word = self._word()
        return Contents(nbytes, self._hash.digest(), word, self._byte(word), tuple(self._runs), repeats)

    def _byte(self, word: int | None) -> int | None:
        """Return the byte that the tensor repeats."""
        if word is not None and word == (word & 255) * BYTE_TO_WORD - (word < 0) * 2**64:
            return word & 255
        constant = not self._blocks and len(self._rest) and bool((self._rest == self._rest[0]).all())
        return int(self._rest[0]) if constant else None

    def _word(self) -> int | None:
        """Return the word of eight bytes that the tensor repeats; its end may be part of a word."""
        if not self._even or len(self._words) > 1:
            return None
        rest = self._rest
        if not self._words:
            return _repeated_word(rest.numpy())
        (word,) = self._words
        want = torch.tensor([word]).view(torch.uint8).repeat(len(rest) // 8 + 1)[: len(rest)]
        return word if bool((rest == want).all()) else None


def _leading(data: Tensor, value: int) -> int:
    """Return the number of bytes at the start with this value."""
    other = (data != value).nonzero()
    return int(other[0, 0]) if other.numel() else len(data)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Floats of a tensor.

    Attributes
    ----------
    low, high
        Range of all values; NaN if a value is NaN.
    quantiles
        Quantiles 0.05, 0.5 and 0.95 of the magnitudes without zeros.
    count
        Number of values.
    retyped
        The same quantiles of the bits of fp16 read as bf16, or of bf16 read as fp16; zeros for other types.
    least, zeros
        Smallest magnitude above zero, and number of zeros; for scales alone.
    """

    low: float
    high: float
    quantiles: tuple[float, float, float]
    count: int
    retyped: tuple[float, float, float]
    least: float
    zeros: int

    @property
    def largest(self) -> float:
        """Largest magnitude; NaN if a value is NaN."""
        return nan if isnan(self.low) or isnan(self.high) else max(abs(self.low), abs(self.high))

    @property
    def median(self) -> float:
        """Median of the magnitudes without zeros."""
        return self.quantiles[1]

    @property
    def finite(self) -> bool:
        """True if every value is finite."""
        return isfinite(self.largest)


class NumbersAccumulator:
    """Accumulator of a tensor's floats, piece by piece. `fully`: count zeros and find the least magnitude."""

    def __init__(self, *, exponents: bool, fully: bool) -> None:
        self._exponents, self._fully = exponents, fully
        self._low, self._high, self._least, self._zeros, self._count = inf, -inf, inf, 0, 0
        self._drawn: list[Tensor] = []

    def add(self, piece: Tensor) -> None:
        """Add the next piece."""
        if self._exponents:
            piece = piece.view(torch.float8_e8m0fnu)
        low, high = _range(piece)
        self._low = low if isnan(low) or low < self._low else self._low
        self._high = high if isnan(high) or high > self._high else self._high
        self._count += len(piece)
        self._drawn.append(piece[:: max(1, len(piece) // DRAWN_VALUES)].clone())
        if self._fully:
            least, zeros = _least(_floats(piece))
            self._least, self._zeros = min(self._least, least), self._zeros + zeros

    def finish(self) -> Numbers:
        """Return the numbers of all pieces."""
        drawn = torch.cat(self._drawn) if self._drawn else torch.zeros(0)
        other = OTHER_TYPE.get(STORED[drawn.dtype])
        retyped = (0.0, 0.0, 0.0) if other is None else _quantiles(_floats(drawn.view(TORCH[other])))
        if not self._count:
            self._low = self._high = 0.0
        return Numbers(
            self._low, self._high, _quantiles(_floats(drawn)), self._count, retyped, self._least, self._zeros
        )


def _range(piece: Tensor) -> tuple[float, float]:
    if STORED[piece.dtype] in FLOATS:
        low, high = torch.aminmax(piece)
        return float(low), float(high)
    if STORED[piece.dtype] in EIGHT_BITS:
        return _ends(piece)
    low, high = (bound.view(piece.dtype).float() for bound in torch.aminmax(piece.view(torch.uint8)))
    return (nan, nan) if isnan(high) else (float(low), float(high))  # exponents alone


def small_contents(piece: Tensor) -> Contents:
    """Return the contents of a small tensor, in one dimension and not empty."""
    data: Bytes = piece.view(torch.uint8).numpy()
    blocks = len(data) // BLOCK_BYTES
    words = data[: blocks * BLOCK_BYTES].view(np.int64).reshape(blocks, BLOCK_WORDS)
    sums, first = words.sum(1), words[:, 0]
    if data[0] == data[-1] and bool((data == data[0]).all()):
        return _constant(data, sums)
    if not bool(((sums == first * BLOCK_WORDS) & (first == words[:, -1])).any()):
        word = None if blocks else _repeated_word(data)
        return Contents(len(data), _digest(data, sums), word, None, (), _repeats(sums))
    streamed = ContentsAccumulator()  # some blocks repeat a word
    streamed.add(piece)
    return streamed.finish()


def _digest(data: Bytes, sums: Sums) -> bytes:
    digest = blake2b(sums.tobytes(), digest_size=16)
    digest.update(data[len(sums) * BLOCK_BYTES :].tobytes())
    return digest.digest()


def _constant(data: Bytes, sums: Sums) -> Contents:
    """Return the contents of equal bytes."""
    byte = int(data[0])
    word = byte * BYTE_TO_WORD - (byte > 127) * 2**64 if len(data) >= 16 else None
    runs = (Run(0, len(data), byte),) if len(sums) else ()
    return Contents(len(data), _digest(data, sums), word, byte, runs, None)


def _repeated_word(data: Bytes) -> int | None:
    """Return the word of eight bytes that fills less than a block; None without one, or below 16 bytes."""
    if len(data) < 16 or not bool((data[8:] == data[:-8]).all()):
        return None
    return int(data[:8].view(np.int64)[0])


def _repeats(sums: Sums) -> Repeats | None:
    """Return blocks with equal sums other than zero."""
    place = sums.argsort(kind="stable")
    ordered = sums[place]
    same = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
    count = int(same.sum())
    if not count:
        return None
    again, first = place[1:][same], place[:-1][same]
    pick = int(again.argmin())
    return Repeats(count, len(sums), int(first[pick]) * BLOCK_BYTES, int(again[pick]) * BLOCK_BYTES)


def small_numbers(piece: Tensor, *, exponents: bool, fully: bool) -> Numbers:
    """Return the numbers of a small tensor, in one dimension and not empty; see `NumbersAccumulator`."""
    eight = STORED[piece.dtype] in EIGHT_BITS
    if exponents or not (eight or STORED[piece.dtype] in WIDE):
        streamed = NumbersAccumulator(exponents=exponents, fully=fully)
        streamed.add(piece)
        return streamed.finish()
    drawn, other = piece[:: max(1, len(piece) // DRAWN_VALUES)], OTHER_TYPE.get(STORED[piece.dtype])
    values = _floats(drawn if eight and not fully else piece)
    low, high = _ends(piece) if eight else (float(values.min()), float(values.max()))
    retyped = (0.0, 0.0, 0.0) if other is None else _quantiles(_floats(drawn.view(TORCH[other])))
    least, zeros = _least(values) if fully else (inf, 0)
    return Numbers(low, high, _quantiles(_floats(drawn)), len(piece), retyped, least, zeros)


def _least(values: Floats) -> tuple[float, int]:
    """Return the smallest magnitude above zero, and the number of zeros."""
    sizes = np.abs(values)
    nonzero = sizes[(sizes > 0) & np.isfinite(sizes)]
    return float(nonzero.min()) if len(nonzero) else inf, int((sizes == 0).sum())


def _quantiles(values: Floats) -> tuple[float, float, float]:
    sizes = np.abs(values)
    sizes = np.sort(sizes[(sizes > 0) & np.isfinite(sizes)])
    if not len(sizes):
        return 0.0, 0.0, 0.0
    low, middle, high = (float(sizes[int(share * (len(sizes) - 1))]) for share in QUANTILES)
    return low, middle, high


def _floats(piece: Tensor) -> Floats:
    if STORED[piece.dtype] in EIGHT_BITS:
        values: Floats = _table(piece.dtype)[piece.view(torch.uint8).numpy()]
        return values
    wide: Floats = piece.float().numpy()
    return wide


def _ends(piece: Tensor) -> tuple[float, float]:
    """Return the range of 8-bit floats from their bytes; the upper end covers magnitudes of both signs."""
    bits, values = piece.view(torch.uint8).numpy(), _table(piece.dtype)
    nan_byte = NAN_BYTE.get(STORED[piece.dtype])
    if nan_byte is not None and bool((bits == nan_byte).any()):
        return nan, nan
    size, signed = int((bits & 127).max()), float(values[bits.max()])
    return min(signed, 0.0) if size else 0.0, float(values[size])


@cache
def _table(dtype: torch.dtype) -> Floats:
    values: Floats = torch.arange(256).to(torch.uint8).view(dtype).float().numpy()
    return values
