"""Layouts as sentences: where each element lies, as data. `qload.devices` moves tensors by them."""

from qload.sentences.digits import AxisDigit, Digit, FieldMove
from qload.sentences.sentence import AxisDigits, Sentence, parse_side, strides
from qload.sentences.words import WORD_BITS, CodeField, WordSentence

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
