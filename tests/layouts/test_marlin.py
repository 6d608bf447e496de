"""Marlin's orders, one element and one block at a time: addresses worked out by hand."""

from collections.abc import Callable

import pytest
import torch

from qload.errors import ArgumentError
from qload.layouts import Order, Packing, marlin

pytestmark = pytest.mark.usefixtures("seen_texts")


@pytest.mark.parametrize(
    ("k", "n", "row", "word", "nibble"),
    [
        pytest.param(0, 0, 0, 0, 0, id="origin"),
        pytest.param(8, 0, 0, 0, 1, id="rows 8 apart are neighbours"),
        pytest.param(0, 8, 0, 0, 2, id="then columns 8 apart"),
        pytest.param(1, 0, 0, 0, 4, id="odd rows fill the upper half of a word"),
        pytest.param(9, 8, 0, 0, 7, id="to the highest nibble"),
        pytest.param(0, 16, 0, 1, 0, id="columns 16 apart are a lane's next word"),
        pytest.param(2, 0, 0, 4, 0, id="the next pair of rows is the next lane"),
        pytest.param(0, 1, 0, 16, 0, id="the next column is four lanes on"),
        pytest.param(15, 63, 0, 127, 7, id="the last of a tile"),
        pytest.param(0, 64, 0, 128, 0, id="64 columns are a tile"),
        pytest.param(16, 0, 1, 0, 0, id="16 rows are a tile"),
    ],
)
def test_one_element_of_4_bits(k: int, n: int, row: int, word: int, nibble: int) -> None:
    codes = torch.zeros(32, 128, dtype=torch.int32)
    codes[k, n] = 1

    words = marlin.rows(4).pack(codes)

    assert words.shape == (2, 256)
    assert words.nonzero().tolist() == [[row, word]]
    assert words[row, word] == 1 << 4 * nibble


@pytest.mark.parametrize(
    ("k", "n", "row", "word", "byte"),
    [
        pytest.param(0, 0, 0, 0, 0, id="origin"),
        pytest.param(8, 0, 0, 0, 1, id="rows 8 apart are neighbours"),
        pytest.param(1, 0, 0, 0, 2, id="odd rows fill the upper half of a word"),
        pytest.param(0, 8, 0, 1, 0, id="columns 8 apart are a lane's next word"),
        pytest.param(0, 16, 0, 2, 0, id="columns 16 apart are the word after it"),
        pytest.param(2, 0, 0, 8, 0, id="the next pair of rows is the next lane"),
        pytest.param(0, 1, 0, 32, 0, id="the next column is four lanes on"),
        pytest.param(15, 62, 0, 223, 3, id="the last row of a column"),
        pytest.param(0, 64, 0, 256, 0, id="64 columns are a tile"),
        pytest.param(16, 0, 1, 0, 0, id="16 rows are a tile"),
    ],
)
def test_one_element_of_8_bits(k: int, n: int, row: int, word: int, byte: int) -> None:
    codes = torch.zeros(32, 128, dtype=torch.int32)
    codes[k, n] = 1

    words = marlin.rows(8).pack(codes)

    assert words.shape == (2, 512)
    assert words.nonzero().tolist() == [[row, word]]
    assert words[row, word] == 1 << 8 * byte


@pytest.mark.parametrize(
    ("bits", "n", "word", "field"),
    [
        pytest.param(4, 0, 0, 0, id="4 bits: origin"),
        pytest.param(4, 16, 0, 1, id="4 bits: even eights of columns first"),
        pytest.param(4, 8, 0, 4, id="4 bits: odd eights in the upper half"),
        pytest.param(4, 1, 1, 0, id="4 bits: the next column is the next word"),
        pytest.param(4, 63, 7, 7, id="4 bits: the last of a tile"),
        pytest.param(4, 64, 8, 0, id="4 bits: 64 columns are a tile"),
        pytest.param(8, 16, 0, 1, id="8 bits: even eights of columns first"),
        pytest.param(8, 8, 0, 2, id="8 bits: odd eights in the upper half"),
        pytest.param(8, 32, 1, 0, id="8 bits: the other half of the columns is the next word"),
        pytest.param(8, 1, 2, 0, id="8 bits: the next column is two words on"),
        pytest.param(8, 64, 16, 0, id="8 bits: 64 columns are a tile"),
    ],
)
def test_one_zero_point(bits: int, n: int, word: int, field: int) -> None:
    zeros = torch.zeros(2, 128, dtype=torch.int32)
    zeros[1, n] = 1

    words = marlin.zeros(bits).pack(zeros)

    assert words.shape == (2, 4 * bits)
    assert words.nonzero().tolist() == [[1, word]]
    assert words[1, word] == 1 << bits * field


@pytest.mark.parametrize(
    ("order", "first"),
    [
        pytest.param(marlin.SCALES_GROUPED, [0, 8, 16, 24, 32, 40, 48, 56, 1, 9], id="grouped"),
        pytest.param(marlin.SCALES_PER_COLUMN, [0, 1, 8, 9, 16, 17, 24, 25, 2, 3], id="per column"),
    ],
)
def test_scales_are_stored_as_a_lane_loads_them(order: Order, first: list[int]) -> None:
    columns = torch.arange(128).expand(2, 128)

    stored = order.apply(columns)

    assert stored[1, :10].tolist() == first
    assert stored[1, 64:74].tolist() == [64 + column for column in first]


def test_scales_of_one_group_repeat_every_32_columns_and_grouped_ones_every_64() -> None:
    columns = torch.arange(64)[None]

    assert marlin.SCALES_PER_COLUMN.apply(columns)[0, 32] == 32
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    assert marlin.SCALES_GROUPED.apply(columns).tolist() == [grouped]


def test_a_bias_is_stored_as_the_scales_of_one_group() -> None:
    columns = torch.arange(64)

    stored = marlin.BIAS.apply(columns)

    runs = [2 * i + 8 * pair + one for i in range(4) for pair in range(4) for one in range(2)]
    assert stored.tolist() == [*runs, *(32 + column for column in runs)]
    assert marlin.SCALES_PER_COLUMN.apply(columns[None]).tolist() == [stored.tolist()]


@pytest.mark.parametrize(
    ("groups", "order"),
    [
        pytest.param(1, marlin.SCALES_PER_COLUMN, id="one row is one scale a column"),
        pytest.param(2, marlin.SCALES_GROUPED, id="two rows are groups"),
        pytest.param(128, marlin.SCALES_GROUPED, id="many rows are groups"),
    ],
)
def test_the_order_of_scales_follows_from_how_many_rows_there_are(groups: int, order: Order) -> None:
    assert marlin.scales(groups) is order


@pytest.mark.parametrize("bits", [4, 8])
def test_tiles_are_16_rows_and_64_columns(bits: int) -> None:
    assert (marlin.rows(bits).granule(0), marlin.rows(bits).granule(1)) == (16, 64)
    assert (marlin.zeros(bits).granule(0), marlin.zeros(bits).granule(1)) == (1, 64)


def test_scales_may_be_cut_where_their_runs_end() -> None:
    assert marlin.SCALES_GROUPED.granule(1) == 64
    assert marlin.SCALES_PER_COLUMN.granule(1) == marlin.BIAS.granule(0) == 32


@pytest.mark.parametrize("packing", [marlin.rows, marlin.zeros], ids=["rows", "zeros"])
@pytest.mark.parametrize("bits", [2, 3, 16])
def test_bits_that_no_marlin_kernel_reads_are_refused(packing: Callable[[int], Packing], bits: int) -> None:
    with pytest.raises(ArgumentError, match="4 or 8, the widths of Marlin's kernels"):
        packing(bits)
