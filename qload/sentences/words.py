"""A layout sentence whose last parenthesis fills int32 words, first code in the low bits. Data alone.

    WordSentence(4, "(kp i) n -> kp n (i)", i=8)          8 codes a word
    WordSentence(3, "(kp i) n -> (kp w) n (i)", i=32, w=3)   32 codes in 3 words, a bit stream

A digit `w` that stands only on the right counts the words that a run of codes fills, and says
where these words go. Which bits of a run hold which code is a list of fields: by default the
codes one after another, straddling words where they must; other fields may leave bits over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from qload.errors import ArgumentError, PatternError, checked
from qload.sentences.sentence import AxisDigits, Sentence, parse_side

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class CodeField:
    """`width` bits of code `code` from its bit `low` up lie at bit `bit` of word `word`."""

    code: int
    low: int
    width: int
    word: int
    bit: int


def stream(bits: int, count: int) -> tuple[CodeField, ...]:
    """`count` codes one after another: code i at bits [i * bits, (i + 1) * bits) of the words."""
    fields = []
    for code in range(count):
        start, low = code * bits, 0
        while low < bits:
            word, bit = divmod(start + low, WORD_BITS)
            width = min(bits - low, WORD_BITS - bit)
            fields.append(CodeField(code, low, width, word, bit))
            low += width
    return tuple(fields)


@dataclass(frozen=True)
class WordSentence:
    """How codes of `bits` bits fill int32 words."""

    bits: int
    pattern: str
    sizes: tuple[tuple[str, int], ...]
    fields: tuple[CodeField, ...]

    @checked
    def __init__(
        self, bits: int, pattern: str, *, fields: tuple[CodeField, ...] | None = None, **sizes: int
    ) -> None:
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "sizes", tuple(sorted(sizes.items())))
        run = prod(sizes[digit] for digit in self.codes.right[-1])
        space = self.words * WORD_BITS
        if run != space // bits or (fields is None and run * bits != space):
            raise PatternError(
                pattern, f"{run} codes of {bits} bits do not fill {self.words} words of {WORD_BITS}"
            )
        object.__setattr__(self, "fields", stream(bits, run) if fields is None else fields)

    @cached_property
    def words(self) -> int:
        """How many words one run of codes fills."""
        return dict(self.sizes).get("w", 1)

    @cached_property
    def codes(self) -> Sentence:
        """The order that brings each run of codes together, as the last axis."""
        sizes = {digit: size for digit, size in self.sizes if digit != "w"}
        return Sentence(self.pattern.replace(" w)", ")"), **sizes)

    @cached_property
    def _axis(self) -> int:
        """The axis of the stored tensor along which a run's words lie, innermost."""
        return next((axis for axis, group in enumerate(self.stored) if group[-1] == "w"), 0)

    @cached_property
    def stored(self) -> AxisDigits:
        """The digits of each axis of words."""
        return parse_side(self.pattern, self.pattern.split("->")[1])[:-1]

    def granule(self, axis: int) -> int:
        """Where codes in plain order may be cut along `axis`: at multiples of this."""
        return self.codes.granule(axis)

    @cached_property
    def run(self) -> int:
        """How many codes a run has."""
        return prod(size for digit, size in self.codes.sizes if digit in self.codes.right[-1])

    def shape_of_codes(self, words: Sequence[int]) -> tuple[int, int]:
        """The shape of `words` -> the shape of the codes in them; ArgumentError where runs are cut."""
        shape, axis = list(words), self._axis
        if shape[axis] % self.words:
            raise ArgumentError("words", f"a multiple of {self.words} along axis {axis}", str(tuple(shape)))
        shape[axis] //= self.words
        run = WORD_BITS * self.words // self.bits
        size = self.codes.digits((*shape, run), self.codes.right)
        rows, columns = (prod(size[digit] for digit in group) for group in self.codes.left)
        return rows, columns

    def shape_of_words(self, codes: Sequence[int]) -> tuple[int, ...]:
        """The shape of `codes` in plain order -> the shape of the words that hold them."""
        size = {**self.codes.digits(tuple(codes), self.codes.left), "w": self.words}
        return tuple(prod(size[digit] for digit in group) for group in self.stored)
