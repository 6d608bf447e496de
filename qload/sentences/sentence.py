"""Layout sentences: positions of elements in einops notation, as data without tensors.

    Sentence("(kp i) n -> kp n i", i=8)

The left side splits the axes of a tensor into digits, outermost first; the right side joins the digits into
other axes. Every digit occurs once on each side, so that the inverse is the line read backwards. At most one
digit of an axis may lack a size, which follows from the tensor.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from qload.errors import ArgumentError, PatternError, checked

_TOKEN = re.compile(r"\(|\)|[a-z]+|\S")

MAX_CACHED_RESULTS = 1 << 10  # per sentence

AxisDigits = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Sentence:
    """Permutation of mixed-radix digits: pattern such as `"(a b) c -> a (c b)"`, and sizes of digits."""

    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()

    @checked
    def __init__(self, pattern: str, **sizes: int) -> None:
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "sizes", tuple(sorted(sizes.items())))
        self._check()

    @cached_property
    def left(self) -> AxisDigits:
        """Digits of each axis in plain order, outermost first."""
        return parse_side(self.pattern, self.pattern.split("->")[0])

    @cached_property
    def right(self) -> AxisDigits:
        """Digits of each axis in the order of the sentence, outermost first."""
        return parse_side(self.pattern, self.pattern.split("->")[1])

    def granule(self, axis: int) -> int:
        """Step of valid cuts of the plain tensor along `axis`: the product of all digits but the first."""
        return prod(self._size[digit] for digit in self.left[axis][1:])

    @cached_property
    def _size(self) -> dict[str, int]:
        return dict(self.sizes)

    def digits(self, shape: tuple[int, ...], groups: AxisDigits) -> dict[str, int]:
        """Size of each digit, by a `shape` and the digits of its axes (`groups`); PatternError."""
        sizes = self.known.get((shape, groups))
        if sizes is None:
            sizes = self._solve_digits(shape, groups)
            self.remember((shape, groups), sizes)
        return dict(sizes)

    @cached_property
    def known(self) -> dict[Any, Any]:
        """Cache of results, as a model has thousands of layers of a few shapes."""
        return {}

    def remember(self, question: Any, answer: Any) -> None:
        """Cache the `answer` to a `question`, up to a limit, as a hostile file may have any shapes."""
        if len(self.known) < MAX_CACHED_RESULTS:
            self.known[question] = answer

    def _solve_digits(self, shape: tuple[int, ...], groups: AxisDigits) -> dict[str, int]:
        if len(shape) != len(groups):
            raise PatternError(self.pattern, f"needs {len(groups)} axes, got shape {shape}")
        size = dict(self._size)
        for extent, group in zip(shape, groups, strict=True):
            inner = prod(self._size[digit] for digit in group if digit in self._size)
            free = [digit for digit in group if digit not in self._size]
            if extent % inner or (not free and extent != inner):
                need = f"a multiple of {inner}" if free else str(inner)
                message = f"axis ({' '.join(group)}) has to be {need}, got {extent} in shape {shape}"
                raise PatternError(self.pattern, message)
            size.update((digit, extent // inner) for digit in free)
        return size

    def _check(self) -> None:
        if self.pattern.count("->") != 1:
            raise PatternError(self.pattern, "needs exactly one '->'")
        sides = [[digit for group in side for digit in group] for side in (self.left, self.right)]
        for digits in sides:
            repeated = sorted({digit for digit in digits if digits.count(digit) > 1})
            if repeated:
                raise PatternError(self.pattern, f"{', '.join(repeated)} stands twice on one side")
        lone = sorted(set(sides[0]) ^ set(sides[1]))
        if lone:
            raise PatternError(self.pattern, f"{', '.join(lone)} stands on one side only: not a permutation")
        unknown = sorted(set(self._size) - set(sides[0]))
        if unknown:
            raise PatternError(self.pattern, f"has no {', '.join(unknown)}, but a size for it")
        for digit, size in self.sizes:
            if size < 1:
                raise PatternError(self.pattern, f"{digit} needs a size of at least 1, got {size}")
        for group in self.left + self.right:
            free = [digit for digit in group if digit not in self._size]
            if len(free) > 1:
                message = f"({' '.join(group)}) leaves {' and '.join(free)} open: give all sizes but one"
                raise PatternError(self.pattern, message)


def strides(groups: AxisDigits, size: Mapping[str, int], of_axes: Sequence[int]) -> dict[str, int]:
    """Stride of each digit, by the strides of the axes (`of_axes`) that the digits form."""
    result = {}
    for group, stride in zip(groups, of_axes, strict=True):
        for digit in reversed(group):
            result[digit] = stride
            stride *= size[digit]
    return result


def parse_side(pattern: str, side: str) -> AxisDigits:
    """Parse one side of a pattern into axes, each a tuple of digits."""
    groups: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    for token in _TOKEN.findall(side):
        if token == "(":
            if inside is not None:
                raise PatternError(pattern, "a parenthesis inside a parenthesis")
            inside = []
        elif token == ")":
            if not inside:
                raise PatternError(pattern, "an empty parenthesis" if inside == [] else "')' without '('")
            groups.append(tuple(inside))
            inside = None
        elif not token.isalpha():
            raise PatternError(pattern, f"cannot read {token!r}")
        elif inside is None:
            groups.append((token,))
        else:
            inside.append(token)
    if inside is not None:
        raise PatternError(pattern, "'(' without ')'")
    return tuple(groups)


WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class CodeField:
    """Bits of a code in a word: `width` bits of `code`, from its bit `low`, at bit `bit` of `word`."""

    code: int
    low: int
    width: int
    word: int
    bit: int


def bit_stream(bits: int, count: int) -> tuple[CodeField, ...]:
    """Fields of `count` consecutive codes: code i at bits [i * bits, (i + 1) * bits) of the words."""
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
    """A layout sentence whose last parenthesis fills int32 words with `bits`-bit codes, first code lowest.

        WordSentence(4, "(kp i) n -> kp n (i)", i=8)             8 codes a word
        WordSentence(3, "(kp i) n -> (kp w) n (i)", i=32, w=3)   32 codes in 3 words, a bit stream

    A digit `w` on the right alone counts the words that a run of codes fills, and gives their place. `fields`
    lists the bits of a run that hold each code: by default one code after another, across words where
    necessary; other fields may leave bits unused.
    """

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
        object.__setattr__(self, "fields", bit_stream(bits, run) if fields is None else fields)

    @cached_property
    def words(self) -> int:
        """Number of words per run of codes."""
        return dict(self.sizes).get("w", 1)

    @cached_property
    def codes(self) -> Sentence:
        """Sentence of the codes, with each run as the last axis."""
        sizes = {digit: size for digit, size in self.sizes if digit != "w"}
        return Sentence(self.pattern.replace(" w)", ")"), **sizes)

    @cached_property
    def _axis(self) -> int:
        """Axis of the stored tensor with a run's words as innermost digit."""
        return next((axis for axis, group in enumerate(self.stored) if group[-1] == "w"), 0)

    @cached_property
    def stored(self) -> AxisDigits:
        """Digits of each axis of words."""
        return parse_side(self.pattern, self.pattern.split("->")[1])[:-1]

    def granule(self, axis: int) -> int:
        """Step of valid cuts of the plain codes along `axis`."""
        return self.codes.granule(axis)

    @cached_property
    def run(self) -> int:
        """Number of codes per run."""
        return prod(size for digit, size in self.codes.sizes if digit in self.codes.right[-1])

    def shape_of_codes(self, words: Sequence[int]) -> tuple[int, int]:
        """Shape of the plain codes, by the shape of `words`; ArgumentError for a partial run."""
        shape, axis = list(words), self._axis
        if shape[axis] % self.words:
            raise ArgumentError("words", f"a multiple of {self.words} along axis {axis}", str(tuple(shape)))
        shape[axis] //= self.words
        run = WORD_BITS * self.words // self.bits
        size = self.codes.digits((*shape, run), self.codes.right)
        rows, columns = (prod(size[digit] for digit in group) for group in self.codes.left)
        return rows, columns

    def shape_of_words(self, codes: Sequence[int]) -> tuple[int, ...]:
        """Shape of the words, by the shape of the plain `codes`."""
        size = {**self.codes.digits(tuple(codes), self.codes.left), "w": self.words}
        return tuple(prod(size[digit] for digit in group) for group in self.stored)
