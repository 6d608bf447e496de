"""Drawings of layouts: each bit of a tile is of the code that the layout's owner puts there."""

from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from qload.cli.capabilities import LAYOUT_NAMES
from qload.errors import ArgumentError
from qload.layouts import Packing, gptq
from qload.pictures import LAYOUTS, drawing, words_of
from qload.pictures.drawing import WORDS_PER_LOAD, code_of_bits

SVG = "{http://www.w3.org/2000/svg}"
WIDTHS = [
    (name, bits)
    for name in LAYOUTS
    for bits in (2, 3, 4, 8)
    if bits in (4, 8) or name.startswith(("gptq", "exl"))
]


def test_awq_by_hand() -> None:
    """Source: AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 into a word, the first in the low bits."""
    found = words_of("awq")

    assert found["tile"] == [1, 8]
    assert found["words"] == {"0,0": [[0, column] for column in (0, 2, 4, 6, 1, 3, 5, 7)]}


def test_codes_of_three_bits_straddle_words() -> None:
    """Source: GPTQ packs 32 codes of 3 bits into 3 words: 2 bits of code 10 are in the first."""
    found = words_of("gptq", 3)["words"]

    assert [found["0,0"][-1], found["1,0"][0]] == [[10, 0], [10, 0]]
    assert found["2,0"][-1] == [31, 0]


def test_marlin_by_hand() -> None:
    """Source: Marlin's first word has rows 0, 1, 8, 9 of columns 0 and 8, interleaved for its kernel."""
    first = words_of("marlin")["words"]["0,0"]

    assert {*map(tuple, first)} == {(row, column) for row in (0, 1, 8, 9) for column in (0, 8)}
    assert first[0] == [0, 0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["marlin", "marlin_24", "strips"])
def test_a_lane_reads_what_one_matrix_instruction_hands_it(layout: str, bits: int) -> None:
    """Source: NVIDIA's PTX, m16n8k16: lane 4c + t holds rows 2t, 2t + 1 and 8 below of column c, modulo 8.

    Strips hand it eight neighbouring rows of 32 in their place, as their kernels reorder activations alike.
    """
    found = words_of(layout, bits)
    rows_of = {"strips": lambda row: row % 32 // 8}.get(layout, lambda row: row % 8 // 2)
    columns_of = {"marlin_24": lambda column: column // 8}.get(layout, lambda column: column % 8)

    assert found["lanes"].keys() == found["words"].keys()
    assert {*found["lanes"].values()} == {*range(32)}
    for place, lane in found["lanes"].items():
        lanes = {4 * columns_of(column) + rows_of(row) for row, column in found["words"][place]}
        assert lanes == {lane}


@pytest.mark.parametrize(("layout", "bits"), [("marlin", 4), ("marlin", 8), ("marlin_24", 4), ("strips", 8)])
def test_a_lane_finds_the_words_of_a_load_side_by_side(layout: str, bits: int) -> None:
    lanes = [*words_of(layout, bits)["lanes"].values()]

    assert all(len({*lanes[at : at + WORDS_PER_LOAD]}) == 1 for at in range(0, len(lanes), WORDS_PER_LOAD))


@pytest.mark.parametrize("layout", ["awq", "gptq", "exllama", "marlin-zeros", "compressed-tensors"])
def test_what_lanes_do_not_read_as_it_lies_has_none(layout: str) -> None:
    assert words_of(layout, 4)["lanes"] == {}
    assert "lane" not in drawing(layout, 4)


def test_a_drawing_says_the_lane_beside_each_word_and_stops_where_asked() -> None:
    text = drawing("marlin", most=6)

    assert "lane 0, word 0,3<" in text
    assert "lane 1, word 0,4<" in text
    assert "a lane loads 4 words at once" in text
    assert "the first 6 words" in text
    assert text.count(">lane ") == 6


@pytest.mark.parametrize(("layout", "bits"), WIDTHS)
def test_every_code_has_as_many_bits_as_it_is_wide(layout: str, bits: int) -> None:
    found, (rows, columns) = code_of_bits(LAYOUTS[layout](bits))
    counts = torch.bincount(found[found >= 0], minlength=rows * columns)

    assert counts.tolist() == [bits] * (rows * columns)


@pytest.mark.parametrize(("layout", "bits"), [("awq", 4), ("marlin", 8), ("gptq", 3)])
def test_owners_are_where_packing_puts_a_code(layout: str, bits: int) -> None:
    """One code that is not 0, the middle one of a tile."""
    packing = LAYOUTS[layout](bits)
    found, tile = code_of_bits(packing)
    codes = torch.zeros(tile, dtype=torch.int32)
    at = codes.numel() // 2
    codes.view(-1)[at] = 2**bits - 1
    words = packing.pack(codes).reshape(-1, 1).long()

    assert torch.equal(words >> torch.arange(32) & 1, (found == at).long())


def test_bits_of_no_code_are_told() -> None:
    """Three codes of eight bits, and a place that no field names."""
    fields = tuple(each for each in gptq.rows(8).fields if each.code < 3)
    packing = Packing(8, "(kp i) n -> kp n (i)", fields=fields, i=4)
    found, _ = code_of_bits(packing)

    assert found[0].tolist() == [0] * 8 + [1] * 8 + [2] * 8 + [-1] * 8


@pytest.mark.parametrize(("layout", "bits"), WIDTHS)
def test_a_drawing_is_xml_with_a_rectangle_for_each_run_of_bits(layout: str, bits: int) -> None:
    tree = ElementTree.fromstring(drawing(layout, bits))
    found = [each for each in tree.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    lines = {each.get("y") for each in found}

    assert sum(int(each.attrib["width"]) for each in found) == len(lines) * 32 * 15
    assert {*tree.attrib} >= {"viewBox", "width", "height"}


@pytest.mark.parametrize(("layout", "bits"), [("nothing", 4), ("marlin", 3), ("awq", 5)])
def test_what_there_is_no_drawing_of_is_refused(layout: str, bits: int) -> None:
    with pytest.raises(ArgumentError):
        drawing(layout, bits)


def test_the_verb_knows_every_layout() -> None:
    assert tuple(LAYOUTS) == LAYOUT_NAMES


@pytest.mark.parametrize(("layout", "bits"), [("gptq", 3), ("marlin", 4)])
def test_the_drawing_of_two_words(layout: str, bits: int, golden: Any) -> None:
    assert drawing(layout, bits, most=2) == golden
