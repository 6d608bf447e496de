"""Digits of a sentence with strides, as needed by routines that move elements between orders.

A digit has a size, and a stride in source and target. Digits of an axis are split to the common refinement of
two sentences.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

from qload.sentences.sentence import WORD_BITS, Sentence, WordSentence, strides

MAX_RUN_WORDS = 32  # words, and codes, of a run that is moved field by field
WHOLE_BITS = (2, 4, 8)  # bit widths of codes without straddling of words


class AxisDigit(NamedTuple):
    """Digit of one axis: size, and stride in elements."""

    size: int
    stride: int


class Digit(NamedTuple):
    """Digit of a move: size, and strides in source and target, in elements."""

    size: int
    source: int
    target: int


class FieldMove(NamedTuple):
    """Move of `width` bits from (word `source`, `source_bit`) to (word `target`, `target_bit`) of a run."""

    source: int
    target: int
    source_bit: int
    target_bit: int
    width: int


class Runs(NamedTuple):
    """Layout of runs: stride of a run's codes, stride of its words, and digits over runs."""

    code: int
    word: int
    digits: list[Digit]


Axis = Sequence[AxisDigit]


@cache
def axis_digits(sentence: Sentence, shape: tuple[int, ...]) -> tuple[tuple[AxisDigit, ...], ...]:
    """Digits of each plain axis, innermost first, with strides in the ordered tensor."""
    cached: tuple[tuple[AxisDigit, ...], ...] | None = sentence.known.get(("axes", shape))
    if cached is not None:
        return cached
    size = sentence.digits(shape, sentence.left)
    extents = [prod(size[digit] for digit in group) for group in sentence.right]
    stride = strides(sentence.right, size, [prod(extents[axis + 1 :]) for axis in range(len(extents))])
    axes = tuple(tuple(AxisDigit(size[d], stride[d]) for d in reversed(group)) for group in sentence.left)
    sentence.remember(("axes", shape), axes)
    return axes


def holds_whole_codes(words: WordSentence) -> bool:
    """Return whether words have consecutive codes without straddling, so that each digit has one stride."""
    return words.bits in WHOLE_BITS and runs_in_turn(words)


def runs_in_turn(words: WordSentence) -> bool:
    """Return whether a run is one word of consecutive codes."""
    result: bool | None = words.codes.known.get("in turn")
    if result is None:
        positions = [(f.code, f.low, f.word, f.bit) for f in words.fields]
        result = positions == [(i, 0, 0, i * words.bits) for i in range(words.run)]
        words.codes.remember("in turn", result)
    return result


@cache
def stream_axis(words: WordSentence) -> int | None:
    """Axis of codes that form a bit stream; None for any other layout."""
    (*outer, run), stored = words.codes.right, words.stored
    straight = all(f.word * WORD_BITS + f.bit == f.code * words.bits + f.low for f in words.fields)
    if not straight or words.run * words.bits != words.words * WORD_BITS:
        return None
    for axis, digits in enumerate(words.codes.left):
        other = 1 - axis
        if len(outer) != 2 or words.codes.left[other] != stored[other]:
            continue
        if stored[axis] in ((*digits[:-1], "w"), digits[:-1]) and digits[-1:] == run and len(digits) == 2:
            return axis
    return None


def runs(
    words: WordSentence, shape: tuple[int, ...], of_codes: Sequence[int], of_words: Sequence[int]
) -> Runs | None:
    """Layout of the runs of codes of a shape, by the strides of codes and words; None for irregular runs."""
    *_, run = words.codes.right
    if len(run) > 1 or max(words.run, words.words) > MAX_RUN_WORDS:
        return None
    size = words.codes.digits(shape, words.codes.left)
    code_strides = strides(words.codes.left, size, of_codes)
    word_strides = strides(words.stored, {**size, "w": words.words}, of_words)
    digits = [Digit(size[d], code_strides[d], word_strides[d]) for d in size if d not in run]
    digits.sort(key=lambda digit: (digit.target, digit.source), reverse=True)
    return Runs(code_strides[run[0]], word_strides.get("w", 1), digits)


def fields_in_common(source: WordSentence, target: WordSentence) -> list[FieldMove]:
    """Moves of bits between the words of a run in two word sentences."""
    return [
        FieldMove(a.word, b.word, a.bit + low - a.low, b.bit + low - b.low, high - low)
        for a in source.fields
        for b in target.fields
        for low, high in [(max(a.low, b.low), min(a.low + a.width, b.low + b.width))]
        if a.code == b.code and low < high
    ]


def axis_in_common(ours: Axis, theirs: Axis) -> list[Digit] | None:
    """Common refinement of the digits of an axis, innermost first; None for digits that do not nest."""
    digits, left, right = [], list(ours), list(theirs)
    while left and right:
        (a, source), (b, target) = left.pop(0), right.pop(0)
        size = min(a, b)
        if size == 0:
            return [Digit(0, 0, 0)]
        if a % size or b % size:
            return None
        digits.append(Digit(size, source, target))
        if a > size:
            left.insert(0, AxisDigit(a // size, source * size))
        if b > size:
            right.insert(0, AxisDigit(b // size, target * size))
    return digits


def in_common(source: Sequence[Axis], target: Sequence[Axis]) -> list[Digit] | None:
    """Common refinement of the digits of two orders of one shape; None for digits that do not nest."""
    digits = _in_common(tuple(map(tuple, source)), tuple(map(tuple, target)))
    return None if digits is None else list(digits)


@lru_cache(1 << 10)
def _in_common(source: tuple[Axis, ...], target: tuple[Axis, ...]) -> list[Digit] | None:
    digits: list[Digit] = []
    for left, right in zip(source, target, strict=True):
        common = axis_in_common(left, right)
        if common is None:
            return None
        digits += common
    return digits


def to_strided(of_target: Sequence[int], *axes: Axis) -> list[Digit]:
    """Digits of a move from the digits of each axis to a tensor with strides `of_target`."""
    digits = []
    for stride, axis in zip(of_target, axes, strict=True):
        for size, source in axis:
            digits.append(Digit(size, source, stride))
            stride *= size
    return digits


def inverse_digits(digits: Sequence[Digit]) -> list[Digit]:
    """Digits of the inverse move."""
    return [Digit(size, target, source) for size, source, target in digits]
