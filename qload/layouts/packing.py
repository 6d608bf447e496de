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

from qload import native
from qload.errors import ArgumentError, PatternError
from qload.layouts import natively, plainly
from qload.layouts.order import AxisDigits, Order, fresh, parse_side
from qload.layouts.packed_codes import PackedCodes

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
class Packing:
    """How codes of `bits` bits fill int32 words; `pack` and `unpack` are inverses, bit for bit.

    PatternError where a run of codes does not fill its words, or the line is no permutation.

    Parameters
    ----------
    pattern
        An order, as `Order` has it, whose last parenthesis fills words.
    fields
        Which bits of a run of words hold which code; None: the codes one after another.
    sizes
        The size of each digit but the one of an axis that follows from the tensor.

    Examples
    --------
    >>> import torch
    >>> from qload import Packing
    >>> rows = Packing(4, "(kp i) n -> kp n (i)", i=8)
    >>> words = rows.pack(torch.arange(8)[:, None])
    >>> hex(words.item())
    '0x76543210'
    >>> rows.unpack(words).flatten()
    tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.int32)
    """

    bits: int
    pattern: str
    sizes: tuple[tuple[str, int], ...]
    fields: tuple[CodeField, ...]

    def __init__(
        self, bits: int, pattern: str, *, fields: tuple[CodeField, ...] | None = None, **sizes: int
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
        return next((axis for axis, group in enumerate(self.stored) if group[-1] == "w"), 0)

    @cached_property
    def stored(self) -> AxisDigits:
        """The digits of each axis of words."""
        return parse_side(self.pattern, self.pattern.split("->")[1])[:-1]

    def granule(self, axis: int) -> int:
        """Where codes in plain order may be cut along `axis`: at multiples of this."""
        return self.codes.granule(axis)

    def packed(self, words: Tensor) -> PackedCodes:
        """int32 `words` -> their codes, not spelled out: to be packed again, or dequantized."""
        self._check_words(words)
        return PackedCodes(self, words)

    def pack(self, codes: Tensor | native.LazyCodes, out: Tensor | None = None) -> Tensor:
        """Codes in [0, 2**bits), any integer dtype, in plain order -> int32 words, new or `out`.

        ArgumentError where one of the `codes` does not fit its bits, or `out` is not such a tensor.
        """
        size = {**self.codes.digits(tuple(codes.shape), self.codes.left), "w": self.words}
        shape = [prod(size[digit] for digit in group) for group in self.stored]
        if isinstance(codes, PackedCodes):
            words = fresh(codes.words, shape, torch.int32, out)
            if natively.repack(codes, self, words):
                return words
        wide = native.plain(codes)
        if wide.dtype != torch.int32:
            self._check(wide)
            wide = wide.to(torch.int32)
        words = fresh(wide, shape, torch.int32, out)
        seen = natively.pack(self, wide, words)
        if seen is None or not 0 <= seen < 2**self.bits:
            self._check(wide)
        if seen is None:
            plainly.pack(self, wide, words)
        return words

    def unpack(self, words: Tensor, out: Tensor | None = None) -> Tensor:
        """int32 `words` -> codes in [0, 2**bits) in plain order, int32, new, or `out`, which may be uint8."""
        self._check_words(words)
        dtype = torch.uint8 if out is not None and out.dtype == torch.uint8 else torch.int32
        codes = fresh(words, self.shape_of(words), dtype, out)
        if not natively.unpack(self, words, codes):
            plainly.unpack(self, words, codes)
        return codes

    def shape_of(self, words: Tensor) -> tuple[int, int]:
        """The shape of the codes that lie in `words`; ArgumentError where runs of words are cut."""
        shape, axis = list(words.shape), self._axis
        if shape[axis] % self.words:
            raise ArgumentError("words", f"a multiple of {self.words} along axis {axis}", str(tuple(shape)))
        shape[axis] //= self.words
        run = WORD_BITS * self.words // self.bits
        size = self.codes.digits((*shape, run), self.codes.right)
        rows, columns = (prod(size[digit] for digit in group) for group in self.codes.left)
        return rows, columns

    def _check_words(self, words: Tensor) -> None:
        if words.dtype != torch.int32:
            raise ArgumentError("words", "dtype int32", str(words.dtype).removeprefix("torch."))

    def _check(self, codes: Tensor) -> None:
        low, high = map(int, codes.aminmax()) if codes.numel() else (0, 0)
        if low < 0 or high >= 2**self.bits:
            raise ArgumentError("codes", f"0 <= code < {2**self.bits}", f"{low} to {high}")
