"""Layout sentences: positions of elements as data. `qload.devices` moves tensors by them."""

from qload.sentences.sentence import (
    WORD_BITS,
    AxisDigits,
    CodeField,
    Sentence,
    WordSentence,
    parse_side,
    strides,
)
from qload.sentences.strided_digits import AxisDigit, Digit, FieldMove

__all__ = [
    "WORD_BITS",
    "AxisDigit",
    "AxisDigits",
    "CodeField",
    "Digit",
    "FieldMove",
    "Sentence",
    "WordSentence",
    "parse_side",
    "strides",
]
