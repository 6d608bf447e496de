"""Codes in words: a sentence whose last parenthesis fills int32 words, carried out on tensors.

Packing(4, "(kp i) n -> kp n (i)", i=8)          8 codes a word
Packing(3, "(kp i) n -> (kp w) n (i)", i=32, w=3)   32 codes in 3 words, a bit stream
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qload import devices
from qload.devices import LazyCodes
from qload.errors import ArgumentError, checked
from qload.layouts.packed_codes import PackedCodes
from qload.sentences import WordSentence


@dataclass(frozen=True, init=False)
class Packing(WordSentence):
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

    def packed(self, words: Tensor) -> PackedCodes:
        """int32 `words` -> their codes, not spelled out: to be packed again, or dequantized."""
        _check_words(words)
        return PackedCodes(self, words)

    @checked
    def pack(self, codes: Tensor | LazyCodes, out: Tensor | None = None) -> Tensor:
        """Codes in [0, 2**bits), any integer dtype, in plain order -> int32 words, new or `out`.

        ArgumentError where one of the `codes` does not fit; then `out` is as it was.
        """
        if isinstance(codes, Tensor):
            devices.check_integers(codes)
        shape = self.shape_of_words(codes.shape)
        if isinstance(codes, PackedCodes):
            words = devices.writable(codes.words, shape, torch.int32, out)
            if devices.repack(codes, self, words):
                return words
        wide = devices.plain(codes)
        if wide.dtype != torch.int32 or out is not None:  # of new words the packing tells as it goes
            devices.check_codes(wide, self.bits)
            wide = wide.to(torch.int32)
        words = devices.writable(wide, shape, torch.int32, out)
        devices.pack(self, wide, words)
        return words

    def unpack(self, words: Tensor, out: Tensor | None = None) -> Tensor:
        """int32 `words` -> codes in [0, 2**bits) in plain order, int32, new, or `out`, which may be uint8."""
        _check_words(words)
        dtype = torch.uint8 if isinstance(out, Tensor) and out.dtype == torch.uint8 else torch.int32
        codes = devices.writable(words, self.shape_of_codes(words.shape), dtype, out)
        devices.unpack(self, words, codes)
        return codes


def _check_words(words: object) -> None:
    if not isinstance(words, Tensor):
        raise ArgumentError("words", "a tensor of dtype int32", type(words).__name__)
    if words.dtype != torch.int32:
        raise ArgumentError("words", "dtype int32", str(words.dtype).removeprefix("torch."))
