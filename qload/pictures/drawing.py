"""Layouts drawn from their sentences: which code of a tile lies in which bits of which word."""

from collections.abc import Callable, Mapping
from typing import Any
from xml.sax.saxutils import escape

import torch

from qload.errors import ArgumentError, checked
from qload.layouts import Packing, awq, compressed_tensors, exllama, gptq, marlin, marlin_24, strips
from qload.pictures.lanes import LANES, LOAD, lane_of
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
MOST = 512  # words that are drawn; of a tile with more, the first
FONT = 'font-family="monospace" font-size="10"'
CELL, ROW, LEFT, TOP = 15, 17, 132, 66  # pixels: a bit's width, a word's height, and the margins


@checked
def drawing(layout: str, bits: int = 4, *, most: int = MOST) -> str:
    """One tile of a layout as SVG: a line for each word, its low bits at the right, and whose codes they are.

    The numbers are a code's place in plain order (row, column); colors go with rows. Beside a word stands the
    lane of a kernel that reads it, where lanes read words as they lie. Of `most` words, the first.
    ArgumentError for a `layout` that is not known, or that has no codes of so many `bits`.
    """
    return _svg(layout, _packing(layout, bits), most)


def _packing(layout: str, bits: int) -> Packing:
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
    packing = _packing(layout, bits)
    bits_of, tile = owners(packing)
    shape = packing.shape_of_words(tile)
    places = [",".join(map(str, _place(at, shape))) for at in range(len(bits_of))]
    words = {
        place: [[*divmod(owner, tile[1])] if owner >= 0 else None for owner in dict.fromkeys(word)]
        for place, word in zip(places, bits_of.tolist(), strict=True)
    }
    found = _lanes(layout, packing, bits_of, tile)
    lanes = {place: lane for place, lane in zip(places, found, strict=True) if lane is not None}
    said = {"layout": layout, "bits": bits, "sentence": packing.pattern, "tile": list(tile)}
    return {**said, "words": words, "lanes": lanes}


def _lanes(layout: str, packing: Packing, bits_of: torch.Tensor, tile: tuple[int, int]) -> list[int | None]:
    """Of each word, by the code in its low bits."""
    return [lane_of(layout, packing, divmod(word[0], tile[1])) for word in bits_of.tolist()]


def owners(packing: Packing) -> tuple[torch.Tensor, tuple[int, int]]:
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
    bits_of, (rows, columns) = owners(packing)
    shape = packing.shape_of_words((rows, columns))
    drawn = bits_of[:most].tolist()
    lanes = _lanes(layout, packing, bits_of, (rows, columns))
    width, height = LEFT + WORD_BITS * CELL + 12, TOP + len(drawn) * ROW + 12
    sizes = ", ".join(f"{digit}={size}" for digit, size in packing.sizes)
    each = "row,column of each" + (f"; a lane loads {LOAD} words at once" if layout in LANES else "")
    left = "" if len(drawn) == len(bits_of) else f", the first {len(drawn)} words"
    box = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {box} {FONT}>',
        f'<rect fill="#fff" {box}/>',
        _text(12, 18, f"{layout}, {packing.bits} bits: {packing.pattern}   {sizes}"),
        _text(
            12,
            34,
            f"a tile of {rows} x {columns} codes in words {tuple(shape)}{left}; {each}",
        ),
    ]
    lines += [
        _text(LEFT + (WORD_BITS - bit - 0.5) * CELL, TOP - 8, str(bit), "middle")
        for bit in (0, 7, 15, 23, 31)
    ]
    for at, owners_of_word in enumerate(drawn):
        place = ",".join(map(str, _place(at, shape)))
        lane = "" if lanes[at] is None else f"lane {lanes[at]}, "
        lines.append(_text(LEFT - 8, TOP + at * ROW + 12, f"{lane}word {place}", "end"))
        lines += _word(owners_of_word, TOP + at * ROW, rows, columns)
    return "\n".join([*lines, "</svg>\n"])


def _word(owners_of_word: list[int], top: int, rows: int, columns: int) -> list[str]:
    """A rectangle for each run of bits that are of one code."""
    lines, start = [], 0
    for bit in range(1, WORD_BITS + 1):
        if bit < WORD_BITS and owners_of_word[bit] == owners_of_word[start]:
            continue
        owner, x, wide = owners_of_word[start], LEFT + (WORD_BITS - bit) * CELL, (bit - start) * CELL
        row, column = divmod(owner, columns)
        fill = (
            "#ddd"
            if owner < 0
            else f"hsl({row * 300 // max(1, rows - 1)} 65% {82 - 24 * column // columns}%)"
        )
        told = "of no code" if owner < 0 else f"row {row}, column {column}: bits {start} to {bit - 1}"
        lines.append(
            f'<rect x="{x}" y="{top}" width="{wide}" height="{ROW - 2}" fill="{fill}" stroke="#777">'
            f"<title>{told}</title></rect>"
        )
        if owner >= 0 and wide >= 3 * CELL:
            lines.append(_text(x + wide / 2, top + 11, f"{row},{column}", "middle"))
        start = bit
    return lines


def _place(at: int, shape: tuple[int, ...]) -> list[int]:
    """The index of word number `at`."""
    found = []
    for size in reversed(shape):
        at, here = divmod(at, size)
        found.append(here)
    return found[::-1]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
