"""Drawings of layouts: each bit of a tile is of the code that the layout's owner puts there."""

from xml.etree import ElementTree

import pytest
import torch

from qload.cli.layout import NAMES
from qload.errors import ArgumentError
from qload.layouts import Packing, gptq
from qload.pictures import LAYOUTS, drawing, words_of
from qload.pictures.drawing import owners

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


@pytest.mark.parametrize(("layout", "bits"), WIDTHS)
def test_every_code_has_as_many_bits_as_it_is_wide(layout: str, bits: int) -> None:
    found, (rows, columns) = owners(LAYOUTS[layout](bits))
    counts = torch.bincount(found[found >= 0], minlength=rows * columns)

    assert counts.tolist() == [bits] * (rows * columns)


@pytest.mark.parametrize(("layout", "bits"), [("awq", 4), ("marlin", 8), ("gptq", 3)])
def test_owners_are_where_packing_puts_a_code(layout: str, bits: int) -> None:
    """One code that is not 0, the middle one of a tile."""
    packing = LAYOUTS[layout](bits)
    found, tile = owners(packing)
    codes = torch.zeros(tile, dtype=torch.int32)
    at = codes.numel() // 2
    codes.view(-1)[at] = 2**bits - 1
    words = packing.pack(codes).reshape(-1, 1).long()

    assert torch.equal(words >> torch.arange(32) & 1, (found == at).long())


def test_bits_of_no_code_are_told() -> None:
    """Three codes of eight bits, and a place that no field names."""
    fields = tuple(each for each in gptq.rows(8).fields if each.code < 3)
    packing = Packing(8, "(kp i) n -> kp n (i)", fields=fields, i=4)
    found, _ = owners(packing)

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
    assert tuple(LAYOUTS) == NAMES
