"""Strips by hand: where one code lies."""

import pytest
import torch

from qload.errors import ArgumentError
from qload.layouts import strips

pytestmark = pytest.mark.usefixtures("seen_texts")


@pytest.mark.parametrize(
    ("k", "n", "strip", "word", "field"),
    [
        pytest.param(0, 0, 0, 0, 0, id="first"),
        pytest.param(1, 0, 0, 0, 4, id="the next row is half a word on"),
        pytest.param(2, 0, 0, 1, 0, id="the row after it, a lane's next word"),
        pytest.param(8, 0, 0, 4, 0, id="the ninth row is the next lane's"),
        pytest.param(32, 0, 0, 0, 2, id="32 rows are a byte"),
        pytest.param(64, 0, 0, 512, 0, id="64 rows are four of a lane's loads"),
        pytest.param(128, 0, 0, 1024, 0, id="128 rows are a unit"),
        pytest.param(0, 1, 0, 16, 0, id="a column is four lanes"),
        pytest.param(0, 8, 0, 0, 1, id="8 columns are a field"),
        pytest.param(0, 16, 0, 128, 0, id="16 columns are a lane's next 16 bytes"),
        pytest.param(0, 64, 1, 0, 0, id="64 columns are a strip"),
    ],
)
def test_one_code_of_four_bits(k: int, n: int, strip: int, word: int, field: int) -> None:
    codes = torch.zeros(256, 128, dtype=torch.int32)
    codes[k, n] = 1

    words = strips.rows(4).pack(codes)

    assert words.nonzero().tolist() == [[strip, word]]
    assert words[strip, word] == 1 << (4 * field)


@pytest.mark.parametrize(
    ("k", "n", "word", "field"),
    [
        pytest.param(1, 0, 0, 2, id="the next row is half a word on"),
        pytest.param(2, 0, 1, 0, id="the row after it, a lane's next word"),
        pytest.param(8, 0, 4, 0, id="the ninth row is the next lane's"),
        pytest.param(32, 0, 512, 0, id="32 rows are four of a lane's loads"),
        pytest.param(0, 1, 16, 0, id="a column is four lanes"),
        pytest.param(0, 8, 0, 1, id="8 columns are a byte"),
        pytest.param(0, 16, 128, 0, id="16 columns are a lane's next 16 bytes"),
    ],
)
def test_one_code_of_eight_bits(k: int, n: int, word: int, field: int) -> None:
    codes = torch.zeros(128, 64, dtype=torch.int32)
    codes[k, n] = 1

    words = strips.rows(8).pack(codes)

    assert words.nonzero().tolist() == [[0, word]]
    assert words[0, word] == 1 << (8 * field)


def test_other_widths_are_refused() -> None:
    with pytest.raises(ArgumentError, match="4 or 8"):
        strips.rows(3)
