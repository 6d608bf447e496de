"""Weights on a CUDA device whose codes run down columns of words, of one width or of many."""

from types import ModuleType

import torch
from torch import Tensor

from qload.devices.operands import StoredCodes, StoredStreams
from qload.devices.tensors import FLOATS, address
from qload.sentences import WORD_BITS, WordSentence

WIDE = 3  # bits of codes that cross words; all others are read by words
STREAM = "(kp i) n -> (kp w) n (i)"


def runs_down(packing: WordSentence) -> bool:
    """Whether codes of 3 bits lie one after another down each column."""
    if packing.bits != WIDE or packing.pattern != STREAM:
        return False
    places = [(field.word * WORD_BITS + field.bit, field.code * WIDE + field.low) for field in packing.fields]
    return all(here == there for here, there in places)


def three_bits(cuda: ModuleType, stored: StoredCodes, out: Tensor, stream: int) -> bool:
    """All outputs of codes of 3 bits; False where they lie otherwise, and nothing was done."""
    codes, rule, zeros = stored.codes, stored.zero_rule, stored.zeros
    if not (codes.turned and codes.order is None and runs_down(codes.packing)):
        return False
    if rule is None or zeros is None or rule.add_to_word or zeros.stride(1) != 1:
        return False
    if stored.scale_order is not None or stored.zero_order is not None:
        return False
    words, scales = codes.words.contiguous(), stored.scales
    tables = 0, 0, address(stored.k_group)
    with torch.cuda.device(out.device):
        return bool(
            cuda.dequantize_streams(
                words.data_ptr(), words.shape[0], WIDE, stored.run, tables, 0,
                (address(scales), FLOATS.index(scales.dtype), *scales.stride()), (0, 0),
                (address(zeros), zeros.stride(0), rule.add, rule.mask),
                *out.shape, FLOATS.index(out.dtype), out.data_ptr(), stream,
            )
        )  # fmt: skip


def streams(cuda: ModuleType, stored: StoredStreams, out: Tensor, stream: int) -> bool:
    """All outputs of groups of their own widths each; False: nothing was done."""
    starts, widths, groups, order = stored.rows().unbind(0)
    words, squares, units = (each.contiguous() for each in (stored.words, stored.squares, stored.units))
    with torch.cuda.device(out.device):
        return bool(
            cuda.dequantize_streams(
                words.data_ptr(), words.shape[0], 0, 1, tuple(map(address, (starts, widths, groups))),
                address(order), (0, 0, 0, 0), (address(squares), address(units)), (0, 0, 0, -1),
                *out.shape, FLOATS.index(out.dtype), out.data_ptr(), stream,
            )
        )  # fmt: skip
