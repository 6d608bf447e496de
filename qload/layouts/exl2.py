"""EXL2's orders: groups of rows of 8, 6, 5, 4, 3 or 2 bits, streamed in checkpoints, shuffled for kernels.

A checkpoint holds each column of a group as a plain little-endian stream. Kernels mask a word and its
shifted self and get pairs of neighbouring rows, half a word apart: the even rows of a run of words lie in
the lower halves, the odd ones in the upper halves, and what does not fit fills the bits left over.

    8 bits  as they come
    6       word a of three: rows 4a to 4a + 3; in the last four bits of the halves of words 0 and 1 the low
            bits of rows 12, 13 and 14, 15, whose two high bits are in those of word 2
    5       word a of five: rows 6a to 6a + 5; in bits 15 and 31 the bits a of rows 30 and 31
    4, 3, 2 as `layouts.exllama`

Source: exllamav2 b9c025b, byte-equal to it but for 5 bits, of which there is no case: these follow the
published kernels. vLLM's copy of the kernels reads 6 bits as they come.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Self

import torch
from torch import Tensor

from qload.layouts import exllama
from qload.layouts.packing import Packing
from qload.sentences import WORD_BITS, CodeField

RUNS = {8: 4, 6: 16, 5: 32, 4: 8, 3: 32, 2: 16}  # codes that fill whole words
STARTS = 1 << 16  # q_groups keeps starts in 16 bits without a sign


@cache
def rows(bits: int) -> Packing:
    """Codes (K, N) of one width -> q_weight (K * bits / 32, N), a stream."""
    run = RUNS[bits]
    words = run * bits // WORD_BITS
    if words == 1:
        return Packing(bits, "(kp i) n -> kp n (i)", i=run)
    return Packing(bits, "(kp i) n -> (kp w) n (i)", i=run, w=words)


@cache
def shuffled(bits: int) -> Packing:
    """Codes (K, N) of one width -> the words (K * bits / 32, N) that kernels read."""
    if bits not in (5, 6):
        return exllama.rows(bits)
    fields = _three_words_of_six() if bits == 6 else _five_words()
    run = RUNS[bits]
    return Packing(bits, "(kp i) n -> (kp w) n (i)", i=run, w=run * bits // WORD_BITS, fields=fields)


@dataclass(frozen=True, eq=False)
class Exl2Groups:
    """The width of each group of rows (G,), and where in q_weight it begins, with the end (G + 1,); int64."""

    bits: Tensor
    starts: Tensor

    @classmethod
    def read(cls, q_groups: Tensor, height: int) -> Self:
        """From (bits, first row of q_weight) of each group, and the rows of q_weight.

        Starts are 16 bits without a sign. Where q_weight is higher than they can say, one that does not
        rise has passed 65,536 once more; whether that is meant, the sum of the rows shows.
        """
        pairs = q_groups.to(torch.int64).reshape(-1, 2)
        starts = pairs[:, 1] % STARTS
        if height > STARTS:
            starts[1:] += STARTS * (starts[1:] <= starts[:-1]).cumsum(0)
        return cls(pairs[:, 0], torch.cat([starts, starts.new_full((1,), height)]))

    @cached_property
    def words(self) -> Tensor:
        """How many rows of q_weight each group takes."""
        return self.starts.diff()

    @cached_property
    def rows(self) -> Tensor:
        """How many rows each group has."""
        return self.words * WORD_BITS // self.bits

    def of_rows(self) -> Tensor:
        """The group of each row, int64 (K,)."""
        return torch.repeat_interleave(self.rows)

    def places(self, K: int) -> Tensor:
        """(first bit in its column, width, group) of each of K rows, int32 (3, K); nobody waits for it."""
        count = self.bits.numel()
        group = torch.arange(count, device=self.bits.device).repeat_interleave(self.rows, output_size=K)
        within = torch.arange(K, device=group.device) - (self.rows.cumsum(0) - self.rows)[group]
        widths = self.bits[group]
        starts = self.starts[group] * WORD_BITS + within * widths
        return torch.stack([starts, widths, group]).to(torch.int32)

    def map(self) -> Tensor:
        """(its group, rows left in it) of each row, 16 bits without a sign, int16 (2 * K,)."""
        group = self.of_rows()
        left = self.rows.cumsum(0)[group] - torch.arange(group.numel(), device=group.device)
        return torch.stack([group, left], dim=1).flatten().to(torch.int16)

    def unpack(self, words: Tensor, *, shuffle: bool = False) -> Tensor:
        """q_weight (R, N), as stored or as shuffled -> codes (K, N) int32, rows as they lie."""
        order, at, codes = shuffled if shuffle else rows, 0, []
        for bits, height, _ in self._runs():
            codes.append(order(bits).unpack(words[at : at + height]))
            at += height
        return torch.cat(codes)

    def gather(self, words: Tensor, K: int) -> Tensor:
        """q_weight (R, N) as stored -> codes (K, N) int32, rows as they lie, as `unpack`.

        Nothing is read on the host, so that a CUDA graph can capture it. A code has at most two words.
        """
        starts, widths, _ = self.places(K).long()[:, :, None].unbind(0)
        word, bit = starts.squeeze(1) // WORD_BITS, starts % WORD_BITS
        plain = words.long() & (1 << WORD_BITS) - 1
        low, high = plain[word], plain[(word + 1).clamp(max=words.shape[0] - 1)]
        return ((low >> bit | high << WORD_BITS - bit) & (1 << widths) - 1).to(torch.int32)

    def pack(self, codes: Tensor, *, shuffle: bool = False) -> Tensor:
        """The inverse of `unpack`."""
        order, at, words = shuffled if shuffle else rows, 0, []
        for bits, _, count in self._runs():
            words.append(order(bits).pack(codes[at : at + count]))
            at += count
        return torch.cat(words)

    def _runs(self) -> list[tuple[int, int, int]]:
        """(bits, words, rows) of neighbouring groups of one width together."""
        bits, run = torch.unique_consecutive(self.bits, return_inverse=True)
        sums = [torch.zeros_like(bits).index_add_(0, run, each).tolist() for each in (self.words, self.rows)]
        return list(zip(bits.tolist(), *sums, strict=True))


def _five_words() -> tuple[CodeField, ...]:
    whole = [
        CodeField(code=6 * word + 2 * i + odd, low=0, width=5, word=word, bit=16 * odd + 5 * i)
        for word in range(5)
        for i in range(3)
        for odd in range(2)
    ]
    split = [
        CodeField(code=30 + odd, low=word, width=1, word=word, bit=16 * odd + 15)
        for word in range(5)
        for odd in range(2)
    ]
    return tuple(whole + split)


def _three_words_of_six() -> tuple[CodeField, ...]:
    whole = [
        CodeField(code=4 * word + 2 * i + odd, low=0, width=6, word=word, bit=16 * odd + 6 * i)
        for word in range(3)
        for i in range(2)
        for odd in range(2)
    ]
    split = [
        field
        for pair in range(2)
        for odd in range(2)
        for code in [12 + 2 * pair + odd]
        for field in (
            CodeField(code=code, low=0, width=4, word=pair, bit=16 * odd + 12),
            CodeField(code=code, low=4, width=2, word=2, bit=16 * odd + 12 + 2 * pair),
        )
    ]
    return tuple(whole + split)
