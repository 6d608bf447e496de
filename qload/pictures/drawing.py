"""Drawings of layouts as SVG: the code in each bit of each word of a tile.

A matrix instruction gives each lane of a warp two columns at distance 8 (digit c of the layout sentence) and
pairs of rows (digit t): lane 4c + t. Marlin's orders and strips store the words of a lane next to each other,
for one or two loads.
"""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any
from xml.sax.saxutils import escape

import torch

from qload.errors import ArgumentError, checked
from qload.layouts import Packing, awq, compressed_tensors, exllama, gptq, marlin, marlin_24, strips
from qload.sentences import WORD_BITS

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
# VerifiedCheckpoint or kernel format -> the layout of its codes.
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
# Digits of the lane number, for layouts with consecutive words of a lane.
LANE_DIGITS = {"marlin": ("c", "t"), "marlin_24": ("c", "t"), "strips": ("c", "t")}
WORDS_PER_LOAD = 4  # 16 bytes
MAX_WORDS = 512  # of a tile in a drawing
MAX_PAGE_WORDS = 16  # of a tile in an HTML page
FONT = 'font-family="monospace" font-size="10"'
SVG_NAMESPACE = ' xmlns="http://www.w3.org/2000/svg"'  # unnecessary in an HTML page
BIT_WIDTH_PX, WORD_HEIGHT_PX, LEFT_MARGIN_PX, TOP_MARGIN_PX = 15, 17, 132, 66


@checked
def drawing(layout: str, bits: int = 4, *, most: int = MAX_WORDS) -> str:
    """Draw one tile of a layout as SVG: a line per word, its low bits at the right, colored by code.

    The numbers are the position of a code in plain order (row, column); colors follow rows. The lane of a
    word is shown for layouts with consecutive words of a lane.

    Parameters
    ----------
    layout
        One of `LAYOUTS`; ArgumentError for any other.
    bits
        Bits of a code; ArgumentError for an unsupported number.
    most
        Maximum number of words; the rest of the tile is left out.
    """
    packing = _find_packing(layout, bits)
    bit_codes, (rows, columns) = code_of_bits(packing)
    shape = packing.shape_of_words((rows, columns))
    words = bit_codes[:most].tolist()
    width = LEFT_MARGIN_PX + WORD_BITS * BIT_WIDTH_PX + 12
    height = TOP_MARGIN_PX + len(words) * WORD_HEIGHT_PX + 12
    sizes = ", ".join(f"{digit}={size}" for digit, size in packing.sizes)
    legend = "row,column of each" + (
        f"; a lane loads {WORDS_PER_LOAD} words at once" if layout in LANE_DIGITS else ""
    )
    part = "" if len(words) == len(bit_codes) else f", the first {len(words)} words"
    box = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {box} {FONT}>',
        f'<rect fill="#fff" {box}/>',
        _text_element(12, 18, f"{layout}, {packing.bits} bits: {packing.pattern}   {sizes}"),
        _text_element(12, 34, f"a tile of {rows} x {columns} codes in words {tuple(shape)}{part}; {legend}"),
    ]
    for bit in (0, 7, 15, 23, 31):
        x = LEFT_MARGIN_PX + (WORD_BITS - bit - 0.5) * BIT_WIDTH_PX
        lines.append(_text_element(x, TOP_MARGIN_PX - 8, str(bit), "middle"))
    for number, word in enumerate(words):
        top = TOP_MARGIN_PX + number * WORD_HEIGHT_PX
        lane = lane_of(layout, packing, divmod(word[0], columns))
        label = f"word {','.join(map(str, _word_index(number, shape)))}"
        title = label if lane is None else f"lane {lane}, {label}"
        lines.append(_text_element(LEFT_MARGIN_PX - 8, top + 12, title, "end"))
        lines += _word_rectangles(word, top, rows, columns)
    return "\n".join([*lines, "</svg>\n"])


@checked
def words_of(layout: str, bits: int = 4) -> dict[str, Any]:
    """Return one tile of a layout as plain data: the codes of each word, from its low bit up.

    Returns
    -------
    dict
        `layout`, `bits`, and its `sentence`; `tile`: rows and columns of the tile; `words`: index of a word
        -> (row, column) of each code, None for unused bits; `lanes`: index of a word -> lane of the warp, for
        layouts with consecutive words of a lane.
    """
    packing = _find_packing(layout, bits)
    bit_codes, tile = code_of_bits(packing)
    shape = packing.shape_of_words(tile)
    words, lanes = {}, {}
    for number, word in enumerate(bit_codes.tolist()):
        index = ",".join(map(str, _word_index(number, shape)))
        words[index] = [[*divmod(code, tile[1])] if code >= 0 else None for code in dict.fromkeys(word)]
        lane = lane_of(layout, packing, divmod(word[0], tile[1]))
        if lane is not None:
            lanes[index] = lane
    facts = {"layout": layout, "bits": bits, "sentence": packing.pattern, "tile": list(tile)}
    return {**facts, "words": words, "lanes": lanes}


def draw_formats(formats: Iterable[tuple[str | None, int | None]]) -> dict[str, str]:
    """Draw the first words of the layout of each (format, bits), as title -> SVG."""
    drawings: dict[str, str] = {}
    for layout, bits in sorted({(LAYOUT_OF_FORMAT.get(name or "", ""), bits or 0) for name, bits in formats}):
        if layout and bits:
            svg = drawing(layout, bits, most=MAX_PAGE_WORDS)
            drawings[f"{layout}, {bits} bits"] = svg.replace(SVG_NAMESPACE, "", 1)
    return drawings


def _find_packing(layout: str, bits: int) -> Packing:
    if layout not in LAYOUTS:
        raise ArgumentError("layout", f"one of {', '.join(LAYOUTS)}", f"{layout!r:.80}")
    try:
        return LAYOUTS[layout](bits)
    except (KeyError, ValueError) as error:
        raise ArgumentError("bits", f"a width supported by {layout}", str(bits)) from error


def lane_of(layout: str, packing: Packing, code: tuple[int, int]) -> int | None:
    """Return the lane that loads the word of a code (row, column), or None for other layouts."""
    digits = LANE_DIGITS.get(layout)
    if digits is None:
        return None
    sizes, lane = dict(packing.sizes), 0
    for digit in digits:
        lane = lane * sizes[digit] + _code_digit(packing, digit, code)
    return lane


def _code_digit(packing: Packing, digit: str, code: tuple[int, int]) -> int:
    """Return one digit of a code's position, along the axis of the digit."""
    sizes = dict(packing.sizes)
    axes = zip(packing.codes.left, code, strict=True)
    axis, position = next((axis, position) for axis, position in axes if digit in axis)
    stride = prod(sizes[other] for other in axis[axis.index(digit) + 1 :])
    return position // stride % sizes[digit]


def code_of_bits(packing: Packing) -> tuple[torch.Tensor, tuple[int, int]]:
    """Find the number of the code in each bit of a tile, int64 (words, 32), and the tile's (rows, columns).

    -1: an unused bit. For each bit of the code numbers it packs all ones into the codes with this bit.
    """
    rows, columns = packing.granule(0), packing.granule(1)
    number = torch.arange(rows * columns).reshape(rows, columns)
    ones = 2**packing.bits - 1
    codes = torch.zeros((packing.pack(torch.zeros_like(number)).numel(), WORD_BITS), dtype=torch.int64)
    shifts = torch.arange(WORD_BITS)
    for bit in range(max(1, (rows * columns - 1).bit_length())):
        words = packing.pack((number >> bit & 1) * ones).reshape(-1, 1).long()
        codes |= (words >> shifts & 1) << bit
    used = packing.pack(torch.full_like(number, ones)).reshape(-1, 1).long() >> shifts & 1
    return torch.where(used.bool(), codes, -1), (rows, columns)


def _word_rectangles(word: list[int], top: int, rows: int, columns: int) -> list[str]:
    """Draw a rectangle per run of bits of one code."""
    lines, start = [], 0
    for bit in range(1, WORD_BITS + 1):
        if bit < WORD_BITS and word[bit] == word[start]:
            continue
        code, x = word[start], LEFT_MARGIN_PX + (WORD_BITS - bit) * BIT_WIDTH_PX
        width = (bit - start) * BIT_WIDTH_PX
        row, column = divmod(code, columns)
        fill, title = "#ddd", "of no code"
        if code >= 0:
            fill = f"hsl({row * 300 // max(1, rows - 1)} 65% {82 - 24 * column // columns}%)"
            title = f"row {row}, column {column}: bits {start} to {bit - 1}"
        lines.append(
            f'<rect x="{x}" y="{top}" width="{width}" height="{WORD_HEIGHT_PX - 2}" fill="{fill}" '
            f'stroke="#777"><title>{title}</title></rect>'
        )
        if code >= 0 and width >= 3 * BIT_WIDTH_PX:
            lines.append(_text_element(x + width / 2, top + 11, f"{row},{column}", "middle"))
        start = bit
    return lines


def _word_index(number: int, shape: tuple[int, ...]) -> list[int]:
    """Return the index of a word from its number in row-major order."""
    index = []
    for size in reversed(shape):
        number, position = divmod(number, size)
        index.append(position)
    return index[::-1]


def _text_element(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
