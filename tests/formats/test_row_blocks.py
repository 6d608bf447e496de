"""Packings in blocks of rows, by hand."""

import pytest
import torch

from qload import dtypes
from qload.layouts import RowBlocks

CODES = torch.tensor([[0], [1], [2], [3], [1], [2]], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("packing", "stored"),
    [
        (RowBlocks(2, 4), [[0b01_10_00], [0b10_11_01]]),
        (RowBlocks(2, 4, high_first=True), [[0b00_10_01_00], [0b01_11_10_00]]),
        (RowBlocks(4, 2, high_first=True), [[0x03], [0x11], [0x22]]),
        (RowBlocks(4, 2, columns=2), [[0x10, 0x21], [0x02, 0x03]]),
        (RowBlocks(4, 2, rows=2), [[0x30, 0x11, 0x22]]),
        (RowBlocks(8, 1), CODES.tolist()),
    ],
    ids=str,
)
def test_words_by_hand(packing: RowBlocks, stored: list[list[int]]) -> None:
    words = packing.pack(CODES)

    assert words.tolist() == stored
    assert tuple(words.shape) == packing.stored_shape((6, 1))
    assert torch.equal(packing.unpack(words, (6, 1)), CODES)


def test_three_bits_have_ten_codes_a_word() -> None:
    """Twelve rows fill ten blocks of two; the highest bits are of the first block."""
    codes = (torch.arange(12)[:, None] % 8).to(torch.uint8)
    packing = RowBlocks(3, 10, high_first=True, word=dtypes.int32, stored=dtypes.int32)

    words = packing.pack(codes)

    assert words[0].item() == 0 << 27 | 2 << 24 | 4 << 21 | 6 << 18 | 0 << 15 | 2 << 12
    assert torch.equal(packing.unpack(words, (12, 1)), codes)


def test_bytes_are_stored_as_floats() -> None:
    codes = torch.arange(16, dtype=torch.uint8).reshape(4, 4)
    packing = RowBlocks(4, 2, high_first=True, stored=dtypes.float16)

    words = packing.pack(codes)

    assert (words.dtype, tuple(words.shape)) == (torch.float16, (2, 2))
    assert words.view(torch.uint8).tolist() == [[0x08, 0x19, 0x2A, 0x3B], [0x4C, 0x5D, 0x6E, 0x7F]]
    assert torch.equal(packing.unpack(words, (4, 4)), codes)
