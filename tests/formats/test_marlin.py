"""Marlin checkpoints, dense and 2:4: blocks small enough to check in your head."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError, CutError, DtypeError, MismatchError, ShapeError
from qload.formats import Marlin24Config, Marlin24Weight, MarlinConfig, MarlinWeight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

NINES = -0x66666667  # 0x99999999: eight codes of 9, which are 1 more than the zero point
NINES_8 = -0x7E7E7E7F  # 0x81818181: four codes of 129
FIRST_TWO = 0x4444  # metadata: of every four rows the first two are kept
# The column whose scale is stored at each of the first places of a run.
GROUPED = [0, 8, 16, 24, 32, 40, 48, 56, 1, 9]
PER_COLUMN = [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]


def counted(groups: int, N: int = 64) -> Tensor:
    """Scales 0, 1, 2, ... as they are stored, and 1000 more for each further group."""
    return (torch.arange(N) + 1000 * torch.arange(groups)[:, None]).half()


def marlin(K: int, group: int, *, N: int = 64, bits: int = 4) -> MarlinWeight:
    """Every code is 1 more than the zero point, so that the weight is its scales."""
    words = NINES if bits == 4 else NINES_8
    return MarlinWeight(
        config=MarlinConfig(group, bits),
        B=torch.full((K // 16, N * bits // 2), words, dtype=torch.int32),
        s=counted(1 if group == -1 else K // group, N),
    )


def marlin_24(K: int, group: int, *, N: int = 64, bits: int = 4) -> Marlin24Weight:
    """As above, in the first two of every four rows."""
    words = NINES if bits == 4 else NINES_8
    return Marlin24Weight(
        config=Marlin24Config(group, bits),
        B_24=torch.full((K // 32, N * bits // 2), words, dtype=torch.int32),
        B_meta=torch.full((K // 32, 2 * N), FIRST_TWO, dtype=torch.int16),
        s=counted(1 if group == -1 else K // group, N),
    )


def weights(weight: Any, config: Any, rank: Rank | None = None) -> Weights:
    tensors = {f"a.{name}": tensor for name, tensor in weight.fields().items()}
    loader = FormatLoader(ConfiguredFormat(type(weight), config))
    return Weights(MemoryStorage(tensors), loader=loader, process_group=rank)


def test_one_code_by_hand() -> None:
    """Row 1 of column 0 is nibble 4 of word 0; all else holds code 0, which is -8."""
    weight = marlin(16, -1)
    weight.s.fill_(2)
    weight.B.fill_(0)
    weight.B[0, 0] = 0xB0000

    assert weight.dequantize()[0, :3].tolist() == [-16, 2 * (11 - 8), -16]
    assert weight.dequantize()[1:].unique().tolist() == [-16]


def test_one_code_of_8_bits_by_hand() -> None:
    """Row 0 of column 8 is the lowest byte of word 1; all else holds code 0, which is -128."""
    weight = marlin(16, -1, bits=8)
    weight.s.fill_(2)
    weight.B.fill_(0)
    weight.B[0, 1] = 0xFF

    assert weight.dequantize()[8, :2].tolist() == [2 * (255 - 128), -256]


@pytest.mark.parametrize("bits", [4, 8])
def test_one_scale_a_column_lies_in_pairs(bits: int) -> None:
    weight = marlin(32, -1, bits=bits)

    assert weight.dequantize()[PER_COLUMN].tolist() == [[place] * 32 for place in range(10)]


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_of_groups_lie_eight_columns_apart(bits: int) -> None:
    weight = marlin(32, 16, bits=bits)

    assert weight.dequantize()[GROUPED, 0].tolist() == list(range(10))
    assert weight.dequantize()[GROUPED, 15].tolist() == list(range(10))
    assert weight.dequantize()[GROUPED, 16].tolist() == list(range(1000, 1010))
    assert weight.plain_scales()[1, GROUPED].tolist() == list(range(1000, 1010))


def test_a_group_that_covers_all_rows_has_the_order_of_one_scale_a_column() -> None:
    weight = marlin(32, 32)

    assert weight.config == MarlinConfig(-1)
    assert weight.dequantize()[PER_COLUMN, 0].tolist() == list(range(10))


def test_a_row_share_left_with_one_group_keeps_the_order_of_groups() -> None:
    stored = marlin(32, 16)

    first, second = (weights(stored, MarlinConfig(16), rank).get_weights_row("a") for rank in FakeWorld(2))

    assert [share.fields()["s"].shape for share in (first, second)] == [(1, 64)] * 2
    assert first.dequantize()[GROUPED].tolist() == [[place] * 16 for place in range(10)]
    assert second.dequantize()[GROUPED].tolist() == [[1000 + place] * 16 for place in range(10)]


def test_a_column_share_takes_whole_tiles() -> None:
    stored = marlin(32, 16, N=128)

    share = weights(stored, MarlinConfig(16), Rank(1, 2)).get_weights_col("a")

    assert share.dequantize()[GROUPED, 0].tolist() == [64 + place for place in range(10)]


def test_2_of_4_by_hand() -> None:
    """Word 0 holds kept rows 0, 8, 1, 9 of column 0, at rows 0, 16, 1, 17; dropped rows are 0."""
    weight = marlin_24(32, -1)
    weight.s.fill_(2)
    weight.B_24[0, 0] = 0x000B0000

    assert weight.dequantize()[0, :8].tolist() == [-16, 2 * (11 - 8), 0, 0, 2, 2, 0, 0]
    assert weight.dequantize()[0, 16:20].tolist() == [-16, -16, 0, 0]
    assert weight.dequantize()[1, :8].tolist() == [2, 2, 0, 0, 2, 2, 0, 0]


def test_the_metadata_says_where_a_kept_code_lies() -> None:
    """Word 0 holds the 16 rows of column 0: quads (0, 1), (2, 3), (1, 3), (0, 3)."""
    weight = marlin_24(32, -1, bits=8)
    weight.s.fill_(2)
    weight.B_meta[0, 0] = 0xCDE4 - (1 << 16)

    assert weight.dequantize()[0, :16].tolist() == [2, 2, 0, 0, 0, 0, 2, 2, 0, 2, 0, 2, 2, 0, 0, 2]
    assert weight.dequantize()[0, 16:20].tolist() == [2, 2, 0, 0]


def test_2_of_4_scales_of_groups_lie_in_pairs_and_of_one_group_in_order() -> None:
    grouped, single = marlin_24(64, 32), marlin_24(64, -1)

    assert grouped.dequantize()[[0, 4, 1, 5, 2, 6, 3, 7, 8], 0].tolist() == list(range(9))
    assert grouped.dequantize()[[0, 4, 1], 32].tolist() == [1000, 1001, 1002]
    assert single.dequantize()[:, 0].tolist() == list(range(64))


def test_a_2_of_4_row_share_left_with_one_group_keeps_the_order_of_groups() -> None:
    stored = marlin_24(64, 32)

    share = weights(stored, Marlin24Config(32), Rank(1, 2)).get_weights_row("a")

    assert share.shape == (64, 32)
    assert share.dequantize()[[0, 4, 1, 5, 2]].tolist() == [[1000 + p, 1000 + p, 0, 0] * 8 for p in range(5)]


def test_a_2_of_4_column_share_takes_whole_tiles() -> None:
    stored = marlin_24(64, 32, N=128)
    stored.B_meta[0, 128] = 0x4449  # the first quad of column 64 keeps rows 1 and 2

    share = weights(stored, Marlin24Config(32), Rank(1, 2)).get_weights_col("a")

    assert share.dequantize()[0, :8].tolist() == [0, 64, 64, 0, 64, 64, 0, 0]


@pytest.mark.parametrize(
    ("stored", "config", "cuts"),
    [
        pytest.param(marlin(48, 16), MarlinConfig(16), "16", id="between tiles"),
        pytest.param(marlin(96, 32), MarlinConfig(32), "32", id="between groups"),
        pytest.param(marlin_24(96, -1), Marlin24Config(-1), "32", id="between 2:4 tiles"),
    ],
)
def test_a_cut_of_rows_inside_a_block_is_refused(stored: Any, config: Any, cuts: str) -> None:
    with pytest.raises(CutError, match=f"cuts must be multiples of {cuts} "):
        weights(stored, config, Rank(0, 2)).get_weights_row("a")


@pytest.mark.parametrize(
    ("stored", "config"),
    [
        pytest.param(marlin(16, -1), MarlinConfig(-1), id="dense"),
        pytest.param(marlin_24(32, -1), Marlin24Config(-1), id="2:4"),
    ],
)
def test_a_cut_of_columns_inside_a_tile_is_refused(stored: Any, config: Any) -> None:
    with pytest.raises(CutError, match="cuts must be multiples of 64 "):
        weights(stored, config, Rank(0, 2)).get_weights_col("a")


def test_a_file_with_impossible_metadata_is_refused() -> None:
    """Field 5 keeps the second row twice."""
    stored = marlin_24(32, -1)
    stored.B_meta[0, 100] = 0x4544

    with pytest.raises(MismatchError) as caught:
        weights(stored, Marlin24Config(-1)).get_weights("a")

    assert str(caught.value).splitlines() == [
        "a.B_meta: metadata without two positions of four, in order",
        "  expected one of 4, 8, 9, 12, 13, 14",
        "  got      5 (1 of 512 fields)",
    ]


@pytest.mark.parametrize("config", [MarlinConfig, Marlin24Config])
@pytest.mark.parametrize(("bits", "group"), [(2, 128), (3, 128), (4, 0), (4, -2)])
def test_bits_and_group_sizes_there_are_none_of_are_refused(config: Any, bits: int, group: int) -> None:
    with pytest.raises(ArgumentError, match=r"marlin(_24)?: (bits|group_size)"):
        config(group, bits)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        pytest.param({"B": torch.zeros(2, 128)}, DtypeError, id="dtype"),
        pytest.param({"B": torch.zeros(2, 256, dtype=torch.int32)}, ShapeError, id="bits"),
        pytest.param({"s": torch.ones(4, 64).half()}, ShapeError, id="groups"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Tensor], error: type[Exception]) -> None:
    stored = marlin(32, 16)

    with pytest.raises(error, match=r"MarlinWeight\.[Bs]: wrong (dtype|shape)"):
        MarlinWeight(config=MarlinConfig(16), **{**stored.fields(), **change})
