"""EXL2's orders, an element at a time."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.layouts import exl2, exllama
from qload.layouts.exl2 import Exl2Groups
from qload.testing import assert_same_bits
from tests.example_counts import at_most

WIDTHS = [8, 6, 5, 4, 3, 2]
every_width = pytest.mark.parametrize("bits", WIDTHS)


def bits_of(packing: Any, k: int) -> list[tuple[int, int]]:
    """(word, bit) of each bit of row k, the lowest first."""
    codes = torch.zeros(exl2.RUN_CODES[packing.bits], packing.bits, dtype=torch.int32)
    codes[k] = 2 ** torch.arange(packing.bits)
    words = packing.pack(codes)
    assert words.count_nonzero() == packing.bits
    return [next((w, b) for w, word in enumerate(words[:, n].tolist()) for b in range(32) if word >> b & 1)
            for n in range(packing.bits)]  # fmt: skip


@every_width
def test_a_checkpoint_holds_a_stream(bits: int) -> None:
    for k in range(exl2.RUN_CODES[bits]):
        places = [divmod(k * bits + i, 32) for i in range(bits)]

        assert bits_of(exl2.rows(bits), k) == places


@pytest.mark.parametrize(
    ("k", "places"),
    [
        pytest.param(0, [(0, bit) for bit in range(6)], id="origin"),
        pytest.param(1, [(0, bit) for bit in range(16, 22)], id="odd rows in the upper half"),
        pytest.param(2, [(0, bit) for bit in range(6, 12)], id="the next even row"),
        pytest.param(3, [(0, bit) for bit in range(22, 28)], id="the next odd row"),
        pytest.param(4, [(1, bit) for bit in range(6)], id="four rows a word"),
        pytest.param(11, [(2, bit) for bit in range(22, 28)], id="to the last word"),
        pytest.param(12, [(0, 12), (0, 13), (0, 14), (0, 15), (2, 12), (2, 13)], id="row 12 in two words"),
        pytest.param(13, [(0, 28), (0, 29), (0, 30), (0, 31), (2, 28), (2, 29)], id="row 13 above it"),
        pytest.param(14, [(1, 12), (1, 13), (1, 14), (1, 15), (2, 14), (2, 15)], id="row 14 a word on"),
        pytest.param(15, [(1, 28), (1, 29), (1, 30), (1, 31), (2, 30), (2, 31)], id="row 15 above it"),
    ],
)
def test_six_bits_are_shuffled_within_three_words(k: int, places: list[tuple[int, int]]) -> None:
    assert bits_of(exl2.kernel_rows(6), k) == places


@pytest.mark.parametrize(
    ("k", "places"),
    [
        pytest.param(0, [(0, bit) for bit in range(5)], id="origin"),
        pytest.param(1, [(0, bit) for bit in range(16, 21)], id="odd rows in the upper half"),
        pytest.param(4, [(0, bit) for bit in range(10, 15)], id="three even rows"),
        pytest.param(6, [(1, bit) for bit in range(5)], id="six rows a word"),
        pytest.param(29, [(4, bit) for bit in range(26, 31)], id="to the last word"),
        pytest.param(30, [(word, 15) for word in range(5)], id="row 30 a bit a word"),
        pytest.param(31, [(word, 31) for word in range(5)], id="row 31 in the highest bits"),
    ],
)
def test_five_bits_are_shuffled_within_five_words(k: int, places: list[tuple[int, int]]) -> None:
    assert bits_of(exl2.kernel_rows(5), k) == places


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_other_widths_are_shuffled_as_gptqs(bits: int) -> None:
    assert exl2.kernel_rows(bits) == exllama.rows(bits)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Exl2Groups, torch.Tensor]:
    """Groups of any widths in any order, and words for them."""
    widths = draw(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=5))
    heights = [exl2.RUN_CODES[bits] * bits // 32 * draw(st.integers(1, 3)) for bits in widths]
    starts = torch.tensor([0, *heights]).cumsum(0)
    q_groups = torch.stack([torch.tensor(widths), starts[:-1]], 1).flatten().to(torch.int16)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    height = int(starts[-1])
    words = torch.randint(-(2**31), 2**31, (height, 2), dtype=torch.int32, generator=generator)
    return Exl2Groups.read(q_groups, height), words


@given(drawn=layers(), shuffle=st.booleans())
@at_most(40)
def test_what_is_unpacked_is_packed_again(drawn: tuple[Exl2Groups, torch.Tensor], shuffle: bool) -> None:
    groups, words = drawn

    codes = groups.unpack(words, shuffle=shuffle)

    assert codes.shape == (int(groups.rows.sum()), 2)
    assert bool((codes < 2 ** groups.bits[groups.of_rows()][:, None]).all())
    assert_same_bits(groups.pack(codes, shuffle=shuffle), words)


@given(drawn=layers())
@at_most(40)
def test_the_map_says_the_group_of_each_row_and_the_rows_left(drawn: tuple[Exl2Groups, torch.Tensor]) -> None:
    groups = drawn[0]

    pairs = groups.map().reshape(-1, 2).tolist()

    rows = groups.rows.tolist()
    assert pairs == [[g, left] for g, count in enumerate(rows) for left in range(count, 0, -1)]


def test_starts_are_16_bits_without_a_sign() -> None:
    q_groups = torch.tensor([8, 0, 8, -25536], dtype=torch.int16)

    assert Exl2Groups.read(q_groups, 50_000).starts.tolist() == [0, 40_000, 50_000]


def test_a_start_that_does_not_rise_has_passed_65536_only_where_words_reach_there() -> None:
    q_groups = torch.tensor([8, 0, 8, -25536, 8, 14_464, 8, -11_072], dtype=torch.int16)

    assert Exl2Groups.read(q_groups, 130_000).starts.tolist() == [0, 40_000, 80_000, 120_000, 130_000]
    assert Exl2Groups.read(q_groups, 65_536).starts.tolist() == [0, 40_000, 14_464, 54_464, 65_536]
