"""What the bytes of a tensor are like, whatever they mean: equal to another's, all alike, or repeated.

Bytes are added up in blocks of 256. Few of the blocks are looked at once more: those whose sum is 32 times
their first word, as sums of equal words are.
"""

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from qload.verify.values.pieces import BLOCK

WORDS = BLOCK // 8
KEPT = 8  # runs, the longest
WINDOW = 1 << 18  # blocks among which repeated ones are looked for: 64 MiB, of whose sums 2 are in memory
ONES = 0x0101010101010101  # times a byte: a word of it, but for the sign


@dataclass(frozen=True, slots=True)
class Run:
    """Equal bytes in a row: the first one's place, how many, and which."""

    first: int
    length: int
    byte: int


@dataclass(frozen=True, slots=True)
class Repeats:
    """Blocks that are stored before: how many of `blocks`, and the places of the first such pair."""

    count: int
    blocks: int
    first: int
    again: int


@dataclass(frozen=True, slots=True)
class Contents:
    """A tensor's bytes: how many; a digest, equal for equal bytes; the word that is all it holds, if one is.

    `byte`: the byte that all are, else None. `runs`: the longest of at least a block. `repeats`: None where
    no block is stored twice.
    """

    nbytes: int
    digest: bytes
    word: int | None
    byte: int | None
    runs: tuple[Run, ...]
    repeats: Repeats | None


class ContentsOf:
    """Accumulates pieces in the order of the file."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._last = torch.empty(0, dtype=torch.uint8)  # the block before
        self._words: set[int] = set()  # of blocks that repeat a word; two are enough to know
        self._even, self._blocks, self._held = True, 0, 0
        self._runs: list[Run] = []
        self._open: Run | None = None  # a run that reaches the end of what was seen
        self._sums: list[Tensor] = []
        self._repeats: Repeats | None = None

    def add(self, piece: Tensor) -> None:
        """The next elements."""
        data = piece.view(torch.uint8)
        if len(self._rest):
            data = torch.cat([self._rest, data])
        count = len(data) // BLOCK
        self._rest = data[count * BLOCK :].clone()
        if count:
            self._add(data[: count * BLOCK])

    def _add(self, data: Tensor) -> None:
        words = data.view(torch.int64).view(-1, WORDS)
        sums, first = words.sum(1), words[:, 0]
        self._hash.update(sums.numpy().data)
        even = (sums == first * WORDS) & (first == words[:, -1])
        if bool(even.any()):
            at = even.nonzero().flatten()
            even[at] = (words[at] == first[at, None]).all(1)
        self._even = self._even and bool(even.all())
        if self._even and len(self._words) < 2:
            self._words.update(torch.unique(first).tolist()[:2])
        self._follow(data, first, even)
        self._sums.append(torch.where(even, 0, sums))
        self._blocks += len(sums)
        self._last = data[-BLOCK:].clone()
        self._held += len(sums)
        if self._held >= WINDOW:
            self._compare()

    def _follow(self, data: Tensor, first: Tensor, even: Tensor) -> None:
        """Runs of equal bytes: the blocks that are one, and their neighbours' bytes."""
        byte = torch.where(even & (first == (first & 255) * ONES), first & 255, -1)
        told = torch.unique_consecutive(byte, return_counts=True)
        values, counts = (found.tolist() for found in told)
        at, base = 0, self._blocks * BLOCK
        for value, count in zip(values, counts, strict=True):
            if value >= 0:
                self._begin(data, at * BLOCK, base, value, count * BLOCK)
            elif self._open is not None:
                self._close(data[at * BLOCK : at * BLOCK + BLOCK])
            at += count

    def _begin(self, data: Tensor, at: int, base: int, value: int, length: int) -> None:
        if self._open is not None and self._open.byte == value:
            self._open = Run(self._open.first, self._open.length + length, value)
            return
        if self._open is not None:
            self._close(data[:0])
        before = data[at - BLOCK : at] if at else self._last
        ahead = _leading(before.flip(0), value)
        self._open = Run(base + at - ahead, length + ahead, value)

    def _close(self, following: Tensor) -> None:
        assert self._open is not None
        more = _leading(following, self._open.byte)
        self._runs.append(Run(self._open.first, self._open.length + more, self._open.byte))
        self._runs = sorted(self._runs, key=lambda run: -run.length)[:KEPT]
        self._open = None

    def _compare(self) -> None:
        """Blocks of this window whose sums are equal; none that repeats one word."""
        sums = torch.cat(self._sums)
        base = (self._blocks - len(sums)) * BLOCK
        self._sums, self._held = [], 0
        ordered, place = sums.sort(stable=True)
        same = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
        count = int(same.sum())
        if count and self._repeats is None:
            again, first = place[1:][same], place[:-1][same]
            pick = int(again.argmin())
            one, other = int(first[pick]), int(again[pick])
            self._repeats = Repeats(count, 0, base + one * BLOCK, base + other * BLOCK)

    def finish(self) -> Contents:
        """What all pieces together are."""
        if self._open is not None:
            self._close(self._rest)
        if self._sums:
            self._compare()
        self._hash.update(self._rest.numpy().data)
        nbytes = self._blocks * BLOCK + len(self._rest)
        found = self._repeats
        repeats = None if found is None else Repeats(found.count, self._blocks, found.first, found.again)
        word = self._word()
        return Contents(nbytes, self._hash.digest(), word, self._byte(word), tuple(self._runs), repeats)

    def _byte(self, word: int | None) -> int | None:
        """The byte that all bytes are."""
        if word is not None and word == (word & 255) * ONES - (word < 0) * 2**64:
            return word & 255
        few = not self._blocks and len(self._rest) and bool((self._rest == self._rest[0]).all())
        return int(self._rest[0]) if few else None

    def _word(self) -> int | None:
        """The word of eight bytes that the tensor repeats, with as much of it as its end has."""
        if not self._even or len(self._words) > 1:
            return None
        rest = self._rest
        if not self._words:
            return _short_word(rest)
        (word,) = self._words
        want = torch.tensor([word]).view(torch.uint8).repeat(len(rest) // 8 + 1)[: len(rest)]
        return word if bool((rest == want).all()) else None


def _short_word(rest: Tensor) -> int | None:
    """The word that less than a block repeats; None where it is not one, or too short to be sure."""
    if len(rest) < 16:
        return None
    head = rest[: len(rest) // 8 * 8].clone().view(torch.int64)
    word = int(head[0])
    want = head[:1].view(torch.uint8).repeat(len(rest) // 8 + 1)[: len(rest)]
    return word if bool((rest == want).all()) else None


def _leading(data: Tensor, value: int) -> int:
    """How many bytes at the start have this value."""
    other = (data != value).nonzero()
    return int(other[0, 0]) if other.numel() else len(data)
