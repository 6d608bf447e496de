"""Drawings of layouts as SVG: the code in each bit of each word of a tile."""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any
from xml.sax.saxutils import escape

import torch

from qload.errors import ArgumentError, checked
from qload.layouts import Packing, awq, compressed_tensors, exllama, gptq, marlin, marlin_24, strips
from qload.sentences import WORD_BITS

LANE_DIGITS = {"marlin": ("c", "t"), "marlin_24": ("c", "t"), "strips": ("c", "t")}
WORDS_PER_LOAD = 4  # words of one load, 16 bytes


def lane_of(layout: str, packing: Packing, code: tuple[int, int]) -> int | None:
    """The lane that reads the word of a code (row, column); None where no lane reads words as they lie."""
    digits = LANE_DIGITS.get(layout)
    if digits is None:
        return None
    sizes, lane = dict(packing.sizes), 0
    for digit in digits:
        lane = lane * sizes[digit] + _code_digit(packing, digit, code)
    return lane


def _code_digit(packing: Packing, digit: str, code: tuple[int, int]) -> int:
    """One digit of the place of a code, along the axis that it is part of."""
    sizes = dict(packing.sizes)
    for axis, at in zip(packing.codes.left, code, strict=True):
        if digit in axis:
            below = prod(sizes[other] for other in axis[axis.index(digit) + 1 :])
            return at // below % sizes[digit]
    raise KeyError(digit)


LAYOUTS: Mapping[str, Callable[[int], Packing]] = {
    "gptq": gptq.rows,
    "gptq-zeros": gptq.columns,
    "awq": awq.columns,
    "exllama": exllama.rows,
    "marlin": marlin.rows,
    "marlin-zeros": marlin.zeros,
    "marlin_24": marlin_24.rows,
    "strips": strips.rows,
    "compressed-tensors": lambda bits: compressed_tensors.rows(bits, True),
}
MAX_WORDS = 512  # words that are drawn; of a tile with more, the first
FONT = 'font-family="monospace" font-size="10"'
BIT_WIDTH_PX, WORD_HEIGHT_PX, LEFT_MARGIN_PX, TOP_MARGIN_PX = (
    15,
    17,
    132,
    66,
)  # pixels: a bit's width, a word's height, and the margins


@checked
def drawing(layout: str, bits: int = 4, *, most: int = MAX_WORDS) -> str:
    """One tile of a layout as SVG: a line for each word, its low bits at the right, and whose codes they are.

    The numbers are a code's place in plain order (row, column); colors go with rows. Beside a word stands the
    lane of a kernel that reads it, where lanes read words as they lie. Of `most` words, the first.
    ArgumentError for a `layout` that is not known, or that has no codes of so many `bits`.
    """
    return _svg(layout, _find_packing(layout, bits), most)


def _find_packing(layout: str, bits: int) -> Packing:
    if layout not in LAYOUTS:
        raise ArgumentError("layout", f"one of {', '.join(LAYOUTS)}", f"{layout!r:.80}")
    try:
        return LAYOUTS[layout](bits)
    except (KeyError, ValueError) as error:
        raise ArgumentError("bits", f"a width that {layout} has", str(bits)) from error


@checked
def words_of(layout: str, bits: int = 4) -> dict[str, Any]:
    """The same as plain data: for each word, from its low bit up, the row and the column of each code.

    `words` by the indices of the words of one tile, which has codes of as many rows and columns as `tile`
    says; None: bits of no code. `lanes`: which lane of a warp reads the word; of layouts that lanes do not
    read as they lie, nothing.
    """
    packing = _find_packing(layout, bits)
    bits_of, tile = code_of_bits(packing)
    shape = packing.shape_of_words(tile)
    places = [",".join(map(str, _word_index(at, shape))) for at in range(len(bits_of))]
    words = {
        place: [[*divmod(owner, tile[1])] if owner >= 0 else None for owner in dict.fromkeys(word)]
        for place, word in zip(places, bits_of.tolist(), strict=True)
    }
    found = _lanes_of_words(layout, packing, bits_of, tile)
    lanes = {place: lane for place, lane in zip(places, found, strict=True) if lane is not None}
    said = {"layout": layout, "bits": bits, "sentence": packing.pattern, "tile": list(tile)}
    return {**said, "words": words, "lanes": lanes}


def _lanes_of_words(
    layout: str, packing: Packing, bits_of: torch.Tensor, tile: tuple[int, int]
) -> list[int | None]:
    """Of each word, by the code in its low bits."""
    return [lane_of(layout, packing, divmod(word[0], tile[1])) for word in bits_of.tolist()]


def code_of_bits(packing: Packing) -> tuple[torch.Tensor, tuple[int, int]]:
    """(words, 32): the code that each bit of a tile's words is of, -1: of none; the tile's (rows, columns).

    Found by packing as loads do: all ones for the codes whose number has a bit, for each bit of the numbers.
    """
    rows, columns = packing.granule(0), packing.granule(1)
    number = torch.arange(rows * columns).reshape(rows, columns)
    ones = 2**packing.bits - 1
    found = torch.zeros((packing.pack(torch.zeros_like(number)).numel(), WORD_BITS), dtype=torch.int64)
    places = torch.arange(WORD_BITS)
    for bit in range(max(1, (rows * columns - 1).bit_length())):
        words = packing.pack((number >> bit & 1) * ones).reshape(-1, 1).long()
        found |= (words >> places & 1) << bit
    held = packing.pack(torch.full_like(number, ones)).reshape(-1, 1).long() >> places & 1
    return torch.where(held.bool(), found, -1), (rows, columns)


def _svg(layout: str, packing: Packing, most: int) -> str:
    bits_of, (rows, columns) = code_of_bits(packing)
    shape = packing.shape_of_words((rows, columns))
    drawn = bits_of[:most].tolist()
    lanes = _lanes_of_words(layout, packing, bits_of, (rows, columns))
    width, height = (
        LEFT_MARGIN_PX + WORD_BITS * BIT_WIDTH_PX + 12,
        TOP_MARGIN_PX + len(drawn) * WORD_HEIGHT_PX + 12,
    )
    sizes = ", ".join(f"{digit}={size}" for digit, size in packing.sizes)
    each = "row,column of each" + (
        f"; a lane loads {WORDS_PER_LOAD} words at once" if layout in LANE_DIGITS else ""
    )
    left = "" if len(drawn) == len(bits_of) else f", the first {len(drawn)} words"
    box = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {box} {FONT}>',
        f'<rect fill="#fff" {box}/>',
        _text_element(12, 18, f"{layout}, {packing.bits} bits: {packing.pattern}   {sizes}"),
        _text_element(
            12,
            34,
            f"a tile of {rows} x {columns} codes in words {tuple(shape)}{left}; {each}",
        ),
    ]
    lines += [
        _text_element(
            LEFT_MARGIN_PX + (WORD_BITS - bit - 0.5) * BIT_WIDTH_PX, TOP_MARGIN_PX - 8, str(bit), "middle"
        )
        for bit in (0, 7, 15, 23, 31)
    ]
    for at, owners_of_word in enumerate(drawn):
        place = ",".join(map(str, _word_index(at, shape)))
        lane = "" if lanes[at] is None else f"lane {lanes[at]}, "
        lines.append(
            _text_element(
                LEFT_MARGIN_PX - 8, TOP_MARGIN_PX + at * WORD_HEIGHT_PX + 12, f"{lane}word {place}", "end"
            )
        )
        lines += _word_rectangles(owners_of_word, TOP_MARGIN_PX + at * WORD_HEIGHT_PX, rows, columns)
    return "\n".join([*lines, "</svg>\n"])


def _word_rectangles(owners_of_word: list[int], top: int, rows: int, columns: int) -> list[str]:
    """A rectangle for each run of bits that are of one code."""
    lines, start = [], 0
    for bit in range(1, WORD_BITS + 1):
        if bit < WORD_BITS and owners_of_word[bit] == owners_of_word[start]:
            continue
        owner, x, wide = (
            owners_of_word[start],
            LEFT_MARGIN_PX + (WORD_BITS - bit) * BIT_WIDTH_PX,
            (bit - start) * BIT_WIDTH_PX,
        )
        row, column = divmod(owner, columns)
        fill = (
            "#ddd"
            if owner < 0
            else f"hsl({row * 300 // max(1, rows - 1)} 65% {82 - 24 * column // columns}%)"
        )
        told = "of no code" if owner < 0 else f"row {row}, column {column}: bits {start} to {bit - 1}"
        lines.append(
            f'<rect x="{x}" y="{top}" width="{wide}" height="{WORD_HEIGHT_PX - 2}" fill="{fill}" '
            f'stroke="#777"><title>{told}</title></rect>'
        )
        if owner >= 0 and wide >= 3 * BIT_WIDTH_PX:
            lines.append(_text_element(x + wide / 2, top + 11, f"{row},{column}", "middle"))
        start = bit
    return lines


def _word_index(at: int, shape: tuple[int, ...]) -> list[int]:
    """The index of word number `at`."""
    found = []
    for size in reversed(shape):
        at, here = divmod(at, size)
        found.append(here)
    return found[::-1]


def _text_element(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


MAX_PAGE_WORDS = 16  # that are drawn of a tile
SVG_NAMESPACE = ' xmlns="http://www.w3.org/2000/svg"'  # which a page of HTML does not need

# Formats whose codes lie as a layout that there is a drawing of says.
LAYOUT_OF_FORMAT: Mapping[str, str] = {
    "gptq": "gptq",
    "awq": "awq",
    "ct_pack": "compressed-tensors",
    "marlin": "marlin",
    "gptq_marlin": "marlin",
    "marlin_24": "marlin_24",
    "strips": "strips",
    "exllama": "exllama",
}


def draw_formats(formats: Iterable[tuple[str | None, int | None]]) -> dict[str, str]:
    """SVG for the layout of each (format, bits) that has one, by its title, each once."""
    found: dict[str, str] = {}
    for name, bits in sorted({(LAYOUT_OF_FORMAT.get(name or "", ""), bits or 0) for name, bits in formats}):
        if name and bits:
            found[f"{name}, {bits} bits"] = drawing(name, bits, most=MAX_PAGE_WORDS).replace(
                SVG_NAMESPACE, "", 1
            )
    return found
