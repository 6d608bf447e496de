"""Panels by hand: where one code and one scale lie."""

import pytest
import torch

from qload.errors import ArgumentError
from qload.layouts import panels

pytestmark = pytest.mark.usefixtures("seen_texts")


@pytest.mark.parametrize(
    ("k", "n", "panel", "word", "field"),
    [
        pytest.param(0, 0, 0, 0, 0, id="first"),
        pytest.param(1, 0, 0, 0, 1, id="the next row is the next four bits"),
        pytest.param(7, 0, 0, 0, 7, id="the eighth row is the highest"),
        pytest.param(8, 0, 0, 16, 0, id="the ninth is 16 words on"),
        pytest.param(0, 1, 0, 1, 0, id="a column is a word"),
        pytest.param(0, 15, 0, 15, 0, id="the last of a panel"),
        pytest.param(0, 16, 1, 0, 0, id="16 columns are a panel"),
    ],
)
def test_one_code_of_four_bits(k: int, n: int, panel: int, word: int, field: int) -> None:
    codes = torch.zeros(16, 32, dtype=torch.int32)
    codes[k, n] = 1

    words = panels.rows(4).pack(codes)

    assert words.nonzero().tolist() == [[panel, word]]
    assert words[panel, word] == 1 << (4 * field)


@pytest.mark.parametrize(
    ("k", "n", "word", "field"),
    [
        pytest.param(1, 0, 0, 1, id="the next row is the next byte"),
        pytest.param(4, 0, 16, 0, id="the fifth is 16 words on"),
        pytest.param(0, 1, 1, 0, id="a column is a word"),
    ],
)
def test_one_code_of_eight_bits(k: int, n: int, word: int, field: int) -> None:
    codes = torch.zeros(8, 16, dtype=torch.int32)
    codes[k, n] = 1

    words = panels.rows(8).pack(codes)

    assert words.nonzero().tolist() == [[0, word]]
    assert words[0, word] == 1 << (8 * field)


def test_scales_of_a_panel_follow_each_other_group_by_group() -> None:
    scales = torch.arange(64).reshape(2, 32)

    assert panels.SCALES.apply(scales)[1].tolist() == [*range(16, 32), *range(48, 64)]


def test_other_widths_are_refused() -> None:
    with pytest.raises(ArgumentError, match="4 or 8"):
        panels.rows(3)
