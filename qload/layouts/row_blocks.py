"""Codes of a matrix whose rows are divided into blocks: a word has the codes of one row of each block.

    word[r, c] = code[r, c] | code[r + R/2, c] << 4     two blocks of R/2 rows, low bits first

The matrix is the weight (N, K), the weight in rows of so many elements, or in so many rows. A share of the
weight has blocks of its own, so that it is packed anew. Rows that do not fill the blocks are padded with 0.
Sources: optimum-quanto 0.2.7, transformers 5.23.0 (BitNet), hqq 0.2.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from qload.dtypes import TORCH, Dtype, uint8
from qload.lazy_torch import Tensor, torch

BYTE = 8


@dataclass(frozen=True)
class RowBlocks:
    """Packing of codes in blocks of rows.

    Attributes
    ----------
    bits, blocks
        Bits of a code, and codes of a word: the number of blocks.
    rows, columns
        Rows, or columns, of the matrix; 0 for both: the axes of the weight.
    high_first
        True if the first block has the highest bits in use.
    word, stored
        Dtype of a word, and the dtype that its bytes are stored as.
    """

    bits: int
    blocks: int
    rows: int = 0
    columns: int = 0
    high_first: bool = False
    word: Dtype = uint8
    stored: Dtype = uint8

    def matrix(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of the matrix of a weight of this `shape`."""
        if self.rows:
            return self.rows, prod(shape) // self.rows
        columns = self.columns or shape[-1]
        return prod(shape) // columns if columns else 0, columns

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Shape of the stored tensor of a weight of this `shape`."""
        rows, columns = self.matrix(shape)
        return -(-rows // self.blocks), columns * self.word.itemsize // self.stored.itemsize

    def loses_bits(self, stored: Tensor, codes: Tensor) -> bool:
        """Return whether the `stored` tensor of `codes` has other unused bits than 0."""
        is_full = self.bits * self.blocks == BYTE * self.word.itemsize
        if is_full and self.matrix(codes.shape)[0] % self.blocks == 0:
            return False
        return not torch.equal(self.pack(codes).view(torch.uint8), stored.contiguous().view(torch.uint8))

    def unpack(self, stored: Tensor, shape: Sequence[int]) -> Tensor:
        """Unpack the `stored` tensor to codes of a `shape`, uint8."""
        words = stored.contiguous().view(TORCH[self.word])
        codes = torch.cat([(words >> shift & 2**self.bits - 1).to(torch.uint8) for shift in self._shifts])
        return codes[: self.matrix(shape)[0]].reshape(tuple(shape))

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes (N, K)."""
        rows, columns = self.matrix(codes.shape)
        height = -(-rows // self.blocks)
        padded = codes.new_zeros((height * self.blocks, columns), dtype=TORCH[self.word])
        padded[:rows] = codes.reshape(rows, columns)
        words = padded.new_zeros((height, columns))
        blocks = padded.reshape(self.blocks, height, columns)
        for shift, block in zip(self._shifts, blocks, strict=True):
            words |= block << shift
        return words.view(TORCH[self.stored])

    @property
    def _shifts(self) -> Sequence[int]:
        """Lowest bit of the code of each block."""
        shifts = range(0, self.bits * self.blocks, self.bits)
        return shifts[::-1] if self.high_first else shifts


@dataclass(frozen=True)
class OneRow:
    """Storage of numbers (R, C) as one row."""

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Shape of the row of numbers of a `shape`."""
        return 1, prod(shape)

    def unpack(self, stored: Tensor, shape: Sequence[int]) -> Tensor:
        """Divide the `stored` row into rows of a `shape`."""
        return stored.reshape(tuple(shape))

    def pack(self, codes: Tensor) -> Tensor:
        """Join the rows of `codes`."""
        return codes.reshape(1, -1)
