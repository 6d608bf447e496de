"""Marlin 2:4: kept codes, metadata, and which two of four rows are kept."""

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.errors import ArgumentError, PatternError
from qload.layouts import marlin_24
from qload.testing import assert_same_bits
from tests.example_counts import at_most

PAIRS = list(combinations(range(4), 2))


@pytest.mark.parametrize(
    ("bits", "k", "n", "row", "word", "field"),
    [
        pytest.param(4, 0, 0, 0, 0, 0, id="4 bits: origin"),
        pytest.param(4, 8, 0, 0, 0, 1, id="4 bits: kept rows 8 apart are neighbours"),
        pytest.param(4, 0, 4, 0, 0, 2, id="4 bits: then columns 4 apart"),
        pytest.param(4, 1, 0, 0, 0, 4, id="4 bits: odd rows fill the upper half of a word"),
        pytest.param(4, 0, 1, 0, 1, 0, id="4 bits: the next column is a lane's next word"),
        pytest.param(4, 2, 0, 0, 4, 0, id="4 bits: the next pair of rows is the next lane"),
        pytest.param(4, 0, 8, 0, 16, 0, id="4 bits: columns 8 apart are four lanes on"),
        pytest.param(4, 15, 63, 0, 127, 7, id="4 bits: the last of a tile"),
        pytest.param(4, 0, 64, 0, 128, 0, id="4 bits: 64 columns are a tile"),
        pytest.param(4, 16, 0, 1, 0, 0, id="4 bits: 16 kept rows are a tile"),
        pytest.param(8, 1, 0, 0, 0, 2, id="8 bits: odd rows fill the upper half of a word"),
        pytest.param(8, 0, 4, 0, 1, 0, id="8 bits: columns 4 apart are a lane's next word"),
        pytest.param(8, 0, 1, 0, 2, 0, id="8 bits: the next column is two words on"),
        pytest.param(8, 0, 8, 0, 32, 0, id="8 bits: columns 8 apart are four lanes on"),
    ],
)
def test_one_kept_code(bits: int, k: int, n: int, row: int, word: int, field: int) -> None:
    codes = torch.zeros(32, 128, dtype=torch.int32)
    codes[k, n] = 1

    words = marlin_24.rows(bits).pack(codes)

    assert words.shape == (2, 64 * bits)
    assert words.nonzero().tolist() == [[row, word]]
    assert words[row, word] == 1 << bits * field


@pytest.mark.parametrize(
    ("k", "n", "row", "word", "bit"),
    [
        pytest.param(0, 0, 0, 0, 0, id="origin"),
        pytest.param(1, 0, 0, 0, 2, id="the second of a quad"),
        pytest.param(2, 0, 0, 0, 4, id="the next quad"),
        pytest.param(6, 0, 0, 0, 12, id="four quads are a word"),
        pytest.param(8, 0, 0, 2, 0, id="the other 16 dense rows are two words on"),
        pytest.param(0, 4, 0, 1, 0, id="columns 4 apart lie between them"),
        pytest.param(0, 1, 0, 4, 0, id="the next column"),
        pytest.param(0, 8, 0, 8, 0, id="columns 8 apart"),
        pytest.param(0, 2, 0, 64, 0, id="columns 2 apart are half a tile away"),
        pytest.param(15, 63, 0, 127, 14, id="the last of a tile"),
        pytest.param(0, 64, 0, 128, 0, id="64 columns are a tile"),
        pytest.param(16, 0, 1, 0, 0, id="32 dense rows are a tile"),
    ],
)
def test_one_field_of_metadata(k: int, n: int, row: int, word: int, bit: int) -> None:
    """Places count kept rows: k is half of quad k // 2."""
    positions = torch.zeros(32, 128, dtype=torch.int32)
    positions[k, n] = 3

    meta = marlin_24.write_positions(positions)

    assert (meta.dtype, tuple(meta.shape)) == (torch.int16, (2, 256))
    assert meta.nonzero().tolist() == [[row, word]]
    assert int(meta[row, word]) & 0xFFFF == 3 << bit


@pytest.mark.parametrize(
    ("held", "kept"),
    [
        pytest.param("0000", (2, 3), id="none"),
        pytest.param("1000", (0, 2), id="the first"),
        pytest.param("0100", (1, 2), id="the second"),
        pytest.param("0010", (2, 3), id="the third"),
        pytest.param("0001", (2, 3), id="the fourth"),
        *[
            pytest.param("".join("01"[i in pair] for i in range(4)), pair, id=f"both {pair}")
            for pair in PAIRS
        ],
    ],
)
def test_a_quad_keeps_what_it_holds_and_fills_up_as_packers_do(held: str, kept: tuple[int, int]) -> None:
    present = torch.tensor([[digit == "1"] for digit in "0000" + held])

    positions = marlin_24.choose_positions(present)

    assert positions.flatten().tolist() == [2, 3, *kept]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("held", ["1110", "1101", "1011", "0111", "1111"])
def test_more_than_two_of_four_are_refused(held: str) -> None:
    present = torch.tensor([[digit == "1"] for digit in "1100" + held])

    with pytest.raises(PatternError, match="more than two of four neighbouring rows have a nonzero value"):
        marlin_24.choose_positions(present)


def test_kept_codes_lie_at_their_rows_and_the_fill_elsewhere() -> None:
    kept = torch.tensor([[1, 5], [2, 6], [3, 7], [4, 8]])
    positions = torch.tensor([[0, 2], [1, 3], [1, 0], [3, 3]])

    dense = marlin_24.scatter(kept, positions, 9)

    assert dense.T.tolist() == [[1, 2, 9, 9, 9, 3, 9, 4], [9, 9, 5, 6, 7, 9, 9, 8]]
    assert marlin_24.gather(dense, positions).tolist() == kept.tolist()


def test_grouped_scales_are_stored_in_pairs_four_columns_apart() -> None:
    columns = torch.arange(128).expand(2, 128)

    stored = marlin_24.SCALES_GROUPED.apply(columns)

    assert stored[1, :9].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8]
    assert stored[1, 64:68].tolist() == [64, 68, 65, 69]


@st.composite
def positions(draw: st.DrawFn) -> torch.Tensor:
    """Two rows of each quad, in order: of 32 or 64 dense rows and 64 or 128 columns."""
    K, N = 32 * draw(st.integers(1, 2)), 64 * draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    pairs = torch.tensor(PAIRS)[torch.randint(0, 6, (K // 4, N), generator=generator)]
    return pairs.movedim(2, 1).reshape(K // 2, N)


@given(places=positions())
@at_most(25)
def test_metadata_is_read_as_it_was_written(places: torch.Tensor) -> None:
    meta = marlin_24.write_positions(places)

    assert torch.equal(marlin_24.read_positions(meta), places)
    assert_same_bits(marlin_24.write_positions(marlin_24.read_positions(meta)), meta)
    assert marlin_24.find_invalid_fields(meta) is None


@given(places=positions(), data=st.data())
@at_most(25)
def test_what_is_spread_is_gathered_again_from_where_it_lies(places: torch.Tensor, data: Any) -> None:
    seed = data.draw(st.integers(0, 2**16))
    kept = torch.randint(1, 16, places.shape, generator=torch.Generator().manual_seed(seed))

    dense = marlin_24.scatter(kept, places, 0)

    assert torch.equal(marlin_24.choose_positions(dense != 0), places)
    assert torch.equal(marlin_24.gather(dense, places), kept)
    assert int((dense != 0).reshape(-1, 4, places.shape[1]).sum(1).max()) == 2


@pytest.mark.parametrize("field", sorted(set(range(16)) - {4, 8, 12, 9, 13, 14}))
def test_a_field_that_names_no_two_places_in_order_is_found(field: int) -> None:
    meta = torch.full((1, 128), 0x4444, dtype=torch.int16)
    meta[0, 77] = 0x4044 | field << 8

    assert marlin_24.find_invalid_fields(meta) == (field, 1, 512)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_two_places_in_order_are_a_field(pair: tuple[int, int]) -> None:
    low, high = pair
    field = low | high << 2
    word = field * 0x1111

    assert (
        marlin_24.find_invalid_fields(torch.full((1, 128), word - (word >> 15 << 16), dtype=torch.int16))
        is None
    )


@pytest.mark.usefixtures("seen_texts")
def test_metadata_is_16_bits_and_codes_are_4_or_8() -> None:
    with pytest.raises(ArgumentError, match="dtype int16"):
        marlin_24.read_positions(torch.zeros(1, 128, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="4 or 8, the widths of Marlin's kernels"):
        marlin_24.rows(2)
