"""EXL2's orders: groups of rows of 8, 6, 5, 4, 3 or 2 bits, a stream in checkpoints, shuffled for kernels.

In a checkpoint each column of a group is a little-endian stream. For kernels, one mask on a word and on the
word shifted gives pairs of neighbouring rows, half a word apart: the even rows of a run of words are in the
lower halves, the odd rows in the upper halves, and the remaining codes fill the unused bits.

    8 bits  a stream
    6       word a of three: rows 4a to 4a + 3; in the last four bits of the halves of words 0 and 1 the low
            bits of rows 12, 13 and 14, 15, their two high bits are in word 2
    5       word a of five: rows 6a to 6a + 5; in bits 15 and 31, bit a of rows 30 and 31
    4, 3, 2 as `layouts.exllama`

Source: exllamav2 b9c025b, byte-equal to it except for 5 bits: no test case exists, and these follow the
published kernels. vLLM's copy of the kernels reads 6 bits as a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from qload.layouts import exllama
from qload.layouts.packing import Packing
from qload.lazy_torch import Tensor, torch
from qload.sentences import WORD_BITS, CodeField

RUN_CODES = {8: 4, 6: 16, 5: 32, 4: 8, 3: 32, 2: 16}  # codes in the shortest run of whole words
START_LIMIT = 1 << 16  # q_groups has starts in 16 unsigned bits


@cache
def rows(bits: int) -> Packing:
    """Packing of codes (K, N) of one width into q_weight (K * bits / 32, N), a stream."""
    run = RUN_CODES[bits]
    words = run * bits // WORD_BITS
    if words == 1:
        return Packing(bits, "(kp i) n -> kp n (i)", i=run)
    return Packing(bits, "(kp i) n -> (kp w) n (i)", i=run, w=words)


@cache
def kernel_rows(bits: int) -> Packing:
    """Packing of codes (K, N) of one width into the kernels' shuffled words (K * bits / 32, N)."""
    if bits not in (5, 6):
        return exllama.rows(bits)
    fields = _three_words_of_six() if bits == 6 else _five_words()
    run = RUN_CODES[bits]
    return Packing(bits, "(kp i) n -> (kp w) n (i)", i=run, w=run * bits // WORD_BITS, fields=fields)


Starts = TypeVar("Starts", "Tensor", NDArray[np.int64])


def unwrap_starts(stored: Starts, height: int) -> Starts:
    """First rows of groups from their unsigned 16 bits; in a higher q_weight they rise over the limit."""
    starts = stored % START_LIMIT
    if height > START_LIMIT:
        starts[1:] += START_LIMIT * (starts[1:] <= starts[:-1]).cumsum(0)
    return starts


@dataclass(frozen=True, eq=False)
class Exl2Groups:
    """Groups of rows: their `bits` (G,), and their `starts` in q_weight with the end (G + 1,); int64."""

    bits: Tensor
    starts: Tensor

    @classmethod
    def read(cls, q_groups: Tensor, height: int) -> Self:
        """Read `q_groups`, (bits, first row of q_weight) of each group; `height`: the rows of q_weight.

        Starts are unsigned 16 bits. In a higher q_weight, a start that does not rise has wrapped at 65,536;
        the caller compares the sum of the rows.
        """
        pairs = q_groups.to(torch.int64).reshape(-1, 2)
        starts = unwrap_starts(pairs[:, 1], height)
        return cls(pairs[:, 0], torch.cat([starts, starts.new_full((1,), height)]))

    @cached_property
    def words(self) -> Tensor:
        """Number of q_weight rows of each group."""
        return self.starts.diff()

    @cached_property
    def rows(self) -> Tensor:
        """Number of rows of each group."""
        return self.words * WORD_BITS // self.bits

    def of_rows(self) -> Tensor:
        """Group of each row, int64 (K,)."""
        return torch.repeat_interleave(self.rows)

    def bit_positions(self, K: int) -> Tensor:
        """(first bit in its column, width, group) of each of K rows, int32 (3, K), without a host copy."""
        count = self.bits.numel()
        group = torch.arange(count, device=self.bits.device).repeat_interleave(self.rows, output_size=K)
        within = torch.arange(K, device=group.device) - (self.rows.cumsum(0) - self.rows)[group]
        widths = self.bits[group]
        starts = self.starts[group] * WORD_BITS + within * widths
        return torch.stack([starts, widths, group]).to(torch.int32)

    def map(self) -> Tensor:
        """(group, remaining rows of the group) of each row, unsigned 16 bits as int16 (2 * K,)."""
        group = self.of_rows()
        left = self.rows.cumsum(0)[group] - torch.arange(group.numel(), device=group.device)
        return torch.stack([group, left], dim=1).flatten().to(torch.int16)

    def unpack(self, words: Tensor, *, shuffle: bool = False) -> Tensor:
        """Unpack q_weight (R, N), as stored or shuffled, to codes, int32 (K, N), in stored row order."""
        order, at, codes = kernel_rows if shuffle else rows, 0, []
        for bits, height, _ in self._runs():
            codes.append(order(bits).unpack(words[at : at + height]))
            at += height
        return torch.cat(codes)

    def gather(self, words: Tensor, K: int) -> Tensor:
        """Unpack q_weight (R, N) as stored to codes, int32 (K, N), without a host copy.

        A CUDA graph can capture it. A code spans at most two words.
        """
        starts, widths, _ = self.bit_positions(K).long()[:, :, None].unbind(0)
        word, bit = starts.squeeze(1) // WORD_BITS, starts % WORD_BITS
        plain = words.long() & (1 << WORD_BITS) - 1
        low, high = plain[word], plain[(word + 1).clamp(max=words.shape[0] - 1)]
        return ((low >> bit | high << WORD_BITS - bit) & (1 << widths) - 1).to(torch.int32)

    def pack(self, codes: Tensor, *, shuffle: bool = False) -> Tensor:
        """Invert `unpack`."""
        order, at, words = kernel_rows if shuffle else rows, 0, []
        for bits, _, count in self._runs():
            words.append(order(bits).pack(codes[at : at + count]))
            at += count
        return torch.cat(words)

    def _runs(self) -> list[tuple[int, int, int]]:
        """(bits, words, rows) of each run of neighbouring groups of one width."""
        bits, run = torch.unique_consecutive(self.bits, return_inverse=True)
        sums = [
            torch.zeros_like(bits).index_add_(0, run, counts).tolist() for counts in (self.words, self.rows)
        ]
        return list(zip(bits.tolist(), *sums, strict=True))


def _five_words() -> tuple[CodeField, ...]:
    unsplit = [
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
    return tuple(unsplit + split)


def _three_words_of_six() -> tuple[CodeField, ...]:
    unsplit = [
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
    return tuple(unsplit + split)
