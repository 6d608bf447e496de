"""Codes beside codes: two weights whose codes, scales, zero points and groups are equal need no dequantizing.

    w = (code - zero) * scale[n_group, k_group] * factor

is what `Weight.dequantize` computes of `Weight.codes()` for every format, so that equal operands are equal
bits. Where an operand differs the values still may not, and those are what is compared then.
"""

from torch import Tensor

from qload.devices import CodesInWords, LazyCodes
from qload.diagnosis.dequantized import meant
from qload.layouts import Packing
from qload.layouts.packed_codes import PackedCodes
from qload.spec import Codes, Weight
from qload.verify.comparison import equal_bits


def lie_in_words(weight: Weight) -> bool:
    """Whether a weight's codes alone say what it means, and lie in words, which many of are little memory."""
    if weight.plain or type(weight).dequantize is not Weight.dequantize or weight.input_factors is not None:
        return False
    return isinstance(weight.codes().codes, CodesInWords)


def equal_codes(one: Weight, other: Weight) -> bool:
    """Whether both dequantize to the same bits, told by their operands; of two weights that lie in words.

    False says nothing: operands that differ, such as groups of another size, may mean the same.
    """
    ours, theirs = one.codes(), other.codes()
    return _same_scales(ours, theirs) and _same_words(ours.codes, theirs.codes)


def same_weight(one: Weight, other: Weight) -> bool:
    """Whether two weights of one type are the same: in shape, config, inputs and the bytes of each tensor.

    Configs that differ are of no account where the values do not.
    """
    ours, theirs = one.fields(), other.fields()
    if type(one) is not type(other) or one.shape != other.shape or one.activations != other.activations:
        return False
    if ours.keys() != theirs.keys() or not all(_same(ours[name], theirs[name]) for name in ours):
        return False
    return bool(one.config == other.config) or _same(meant(one), meant(other))


def _same_scales(ours: Codes, theirs: Codes) -> bool:
    """All but the codes."""
    said = [(each.bits, each.divide, each.factor) for each in (ours, theirs)]
    if said[0] != said[1] or not _same(ours.scales, theirs.scales):
        return False
    pairs = [
        (getattr(ours, name), getattr(theirs, name)) for name in ("zeros", "k_group", "n_group", "lookup")
    ]
    return all(here is there is None or _same(here, there) for here, there in pairs)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Two tensors of one dtype and shape, in equal bits."""
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return equal_bits(one, other)


def _same_words(ours: Tensor | LazyCodes, theirs: Tensor | LazyCodes) -> bool:
    """Codes in words beside those in others, which are brought into the order of the first."""
    if not isinstance(ours, PackedCodes) or not isinstance(theirs, PackedCodes) or ours.order is not None:
        return False
    held = theirs.T if ours.turned else theirs  # as the words of ours hold them, rows for rows
    if held.packing == ours.packing and not held.turned and held.order is None:
        return equal_bits(held.words, ours.words)
    return isinstance(ours.packing, Packing) and equal_bits(ours.packing.pack(held), ours.words)
