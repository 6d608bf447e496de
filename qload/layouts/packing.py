"""Codes in words: an order whose last parenthesis fills int32 words, first code in the low bits.

    Packing(4, "(kp i) n -> kp n (i)", i=8)          8 codes a word
    Packing(3, "(kp i) n -> (kp w) n (i)", i=32, w=3)   32 codes in 3 words, a bit stream

A digit `w` that stands only on the right counts the words that a run of codes fills, and says
where these words go. Which bits of a run hold which code is a list of fields: by default the
codes one after another, straddling words where they must; other fields may leave bits over.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from qload.errors import ArgumentError, PatternError
from qload.layouts.order import Order, parse_side

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Field:
    """`width` bits of code `code` from its bit `low` up lie at bit `bit` of word `word`."""

    code: int
    low: int
    width: int
    word: int
    bit: int


def stream(bits: int, count: int) -> tuple[Field, ...]:
    """`count` codes one after another: code i at bits [i * bits, (i + 1) * bits) of the words."""
    fields = []
    for code in range(count):
        start, low = code * bits, 0
        while low < bits:
            word, bit = divmod(start + low, WORD_BITS)
            width = min(bits - low, WORD_BITS - bit)
            fields.append(Field(code, low, width, word, bit))
            low += width
    return tuple(fields)


@dataclass(frozen=True)
class Packing:
    """How codes of `bits` bits fill int32 words; `pack` and `unpack` are inverses, bit for bit."""

    bits: int
    pattern: str
    sizes: tuple[tuple[str, int], ...]
    fields: tuple[Field, ...]

    def __init__(
        self, bits: int, pattern: str, *, fields: tuple[Field, ...] | None = None, **sizes: int
    ) -> None:
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "sizes", tuple(sorted(sizes.items())))
        run = prod(sizes[digit] for digit in self.codes.right[-1])
        room = self.words * WORD_BITS
        if run != room // bits or (fields is None and run * bits != room):
            raise PatternError(
                pattern, f"{run} codes of {bits} bits do not fill {self.words} words of {WORD_BITS}"
            )
        object.__setattr__(self, "fields", stream(bits, run) if fields is None else fields)

    @cached_property
    def words(self) -> int:
        """How many words one run of codes fills."""
        return dict(self.sizes).get("w", 1)

    @cached_property
    def codes(self) -> Order:
        """The order that brings each run of codes together, as the last axis."""
        sizes = {digit: size for digit, size in self.sizes if digit != "w"}
        return Order(self.pattern.replace(" w)", ")"), **sizes)

    @cached_property
    def _axis(self) -> int:
        """The axis of the stored tensor along which a run's words lie, innermost."""
        groups = parse_side(self.pattern, self.pattern.split("->")[1])
        return next((axis for axis, group in enumerate(groups) if group[-1] == "w"), 0)

    def granule(self, axis: int) -> int:
        """Where codes in plain order may be cut along an axis: at multiples of this."""
        return self.codes.granule(axis)

    def pack(self, codes: Tensor) -> Tensor:
        """Codes in [0, 2**bits), any integer dtype, in plain order -> int32 words."""
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 2**self.bits:
            raise ArgumentError(
                "codes", f"0 <= code < {2**self.bits}", f"{int(codes.min())} to {int(codes.max())}"
            )
        runs = self.codes.apply(codes.to(torch.int32))
        words = runs.new_zeros(*runs.shape[:-1], self.words)
        for f in self.fields:
            part = (runs[..., f.code] >> f.low) & _mask(f.width)
            words[..., f.word] |= part << f.bit
        return words.movedim(-1, self._axis + 1).flatten(self._axis, self._axis + 1).contiguous()

    def unpack(self, words: Tensor) -> Tensor:
        """int32 words -> codes in [0, 2**bits), int32, in plain order."""
        if words.dtype != torch.int32:
            raise ArgumentError("words", "dtype int32", str(words.dtype).removeprefix("torch."))
        if words.shape[self._axis] % self.words:
            raise ArgumentError(
                "words", f"a multiple of {self.words} along axis {self._axis}", str(tuple(words.shape))
            )
        shape, axis = tuple(words.shape), self._axis
        apart = words.reshape(*shape[:axis], shape[axis] // self.words, self.words, *shape[axis + 1 :])
        runs = apart.movedim(axis + 1, -1)
        count = WORD_BITS * self.words // self.bits
        codes = runs.new_zeros(*runs.shape[:-1], count)
        for f in self.fields:
            part = (runs[..., f.word] >> f.bit) & _mask(f.width)
            codes[..., f.code] |= part << f.low
        return self.codes.undo(codes)


def _mask(width: int) -> int:
    return (1 << width) - 1
