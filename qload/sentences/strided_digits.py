"""The digits of a sentence with their strides: what a routine needs to move elements from order to order.

A digit says how many values it has and how far apart its values lie on either side. Digits of one axis that
two sentences cut in different places are cut in both.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

from qload.sentences.sentence import WORD_BITS, Sentence, WordSentence, strides

MAX_RUN_WORDS = 32  # of a run that is moved field by field, codes as well as words
WHOLE_BITS = (2, 4, 8)  # bits of codes that words hold in whole numbers


class AxisDigit(NamedTuple):
    """A digit of one axis: how many values it has, and its stride in elements."""

    size: int
    stride: int


class Digit(NamedTuple):
    """A digit of elements that move: how many values it has, and its strides in elements."""

    size: int
    source: int
    target: int


class FieldMove(NamedTuple):
    """`width` bits from bit `source_bit` of word `source` of a run to bit `target_bit` of word `target`."""

    source: int
    target: int
    source_bit: int
    target_bit: int
    width: int


class Runs(NamedTuple):
    """Where runs lie: the stride of a run's codes, that of its words, and the digits that count runs."""

    code: int
    word: int
    digits: list[Digit]


Axis = Sequence[AxisDigit]


@cache
def axis_digits(sentence: Sentence, shape: tuple[int, ...]) -> tuple[tuple[AxisDigit, ...], ...]:
    """The digits of each plain axis, innermost first, and their strides in the ordered tensor."""
    known: tuple[tuple[AxisDigit, ...], ...] | None = sentence.known.get(("axes", shape))
    if known is not None:
        return known
    size = sentence.digits(shape, sentence.left)
    extents = [prod(size[digit] for digit in group) for group in sentence.right]
    stride = strides(sentence.right, size, [prod(extents[axis + 1 :]) for axis in range(len(extents))])
    axes = tuple(tuple(AxisDigit(size[d], stride[d]) for d in reversed(group)) for group in sentence.left)
    sentence.remember(("axes", shape), axes)
    return axes


def holds_whole_codes(words: WordSentence) -> bool:
    """Whether words hold whole codes one after another, so that each digit of codes has one stride."""
    return words.bits in WHOLE_BITS and runs_in_turn(words)


def runs_in_turn(words: WordSentence) -> bool:
    """Whether a run is one word, which holds whole codes one after another."""
    known: bool | None = words.codes.known.get("in turn")
    if known is None:
        found = [(f.code, f.low, f.word, f.bit) for f in words.fields]
        known = found == [(i, 0, 0, i * words.bits) for i in range(words.run)]
        words.codes.remember("in turn", known)
    return known


@cache
def stream_axis(words: WordSentence) -> int | None:
    """The axis that codes of any width follow each other along, bit after bit; None where they do not."""
    (*outer, run), stored = words.codes.right, words.stored
    straight = all(f.word * WORD_BITS + f.bit == f.code * words.bits + f.low for f in words.fields)
    if not straight or words.run * words.bits != words.words * WORD_BITS:
        return None
    for axis, digits in enumerate(words.codes.left):
        here, other = stored[axis], 1 - axis
        alike = len(outer) == 2 and words.codes.left[other] == stored[other]
        if alike and here in ((*digits[:-1], "w"), digits[:-1]) and digits[-1:] == run and len(digits) == 2:
            return axis
    return None


def runs(
    words: WordSentence, shape: tuple[int, ...], of_codes: Sequence[int], of_words: Sequence[int]
) -> Runs | None:
    """Where the runs of codes of a shape lie, from the strides of codes and words; None: in no one stride."""
    *_, run = words.codes.right
    if len(run) > 1 or max(words.run, words.words) > MAX_RUN_WORDS:
        return None
    size = words.codes.digits(shape, words.codes.left)
    here = strides(words.codes.left, size, of_codes)
    there = strides(words.stored, {**size, "w": words.words}, of_words)
    digits = [Digit(size[digit], here[digit], there[digit]) for digit in size if digit not in run]
    digits.sort(key=lambda digit: (digit.target, digit.source), reverse=True)
    return Runs(here[run[0]], there.get("w", 1), digits)


def fields_in_common(source: WordSentence, target: WordSentence) -> list[FieldMove]:
    """The moves of bits that bring a run of one sentence's words into the words of another."""
    return [
        FieldMove(a.word, b.word, a.bit + low - a.low, b.bit + low - b.low, high - low)
        for a in source.fields
        for b in target.fields
        for low, high in [(max(a.low, b.low), min(a.low + a.width, b.low + b.width))]
        if a.code == b.code and low < high
    ]


def axis_in_common(ours: Axis, theirs: Axis) -> list[Digit] | None:
    """The digits of an axis that both sides are made of, innermost first; None where one cuts another's."""
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
    """The digits that two orders of one shape are made of; None where their cuts do not nest."""
    found = _in_common(tuple(map(tuple, source)), tuple(map(tuple, target)))
    return None if found is None else list(found)


@lru_cache(1 << 10)
def _in_common(source: tuple[Axis, ...], target: tuple[Axis, ...]) -> list[Digit] | None:
    found: list[Digit] = []
    for left, right in zip(source, target, strict=True):
        both = axis_in_common(left, right)
        if both is None:
            return None
        found += both
    return found


def to_strided(of_target: Sequence[int], *axes: Axis) -> list[Digit]:
    """From the digits of each axis to a strided tensor."""
    digits = []
    for stride, axis in zip(of_target, axes, strict=True):
        for size, place in axis:
            digits.append(Digit(size, place, stride))
            stride *= size
    return digits


def turned(digits: Sequence[Digit]) -> list[Digit]:
    """The same digits from the target to the source."""
    return [Digit(size, target, source) for size, source, target in digits]
