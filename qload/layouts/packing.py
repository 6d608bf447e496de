"""Layout sentences applied to tensors: elements in another order, and codes packed into int32 words.

    marlin.rows(4).pack(gptq.rows(4).packed(qweight)[perm])

is one pass over the words in native code, and `pack(unpack(qweight)[perm])` without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Self

from qload import devices
from qload.devices import CodesInWords, LazyCodes, Meaning
from qload.errors import ArgumentError, checked
from qload.lazy_torch import Tensor, torch
from qload.sentences import Sentence, WordSentence


@dataclass(frozen=True, init=False)
class Order(Sentence):
    """A permutation of mixed-radix digits, as `"(a b) c -> a (c b)"` with the digits' sizes.

    PatternError where the line is no permutation, or leaves two digits of an axis open.

    Parameters
    ----------
    pattern
        The digits of each axis before and after, outermost first.
    sizes
        The size of each digit but the one of an axis that follows from the tensor.

    Examples
    --------
    >>> import torch
    >>> from qload import Order
    >>> pairs = Order("(half place) -> (place half)", half=2)
    >>> pairs.apply(torch.arange(6))
    tensor([0, 3, 1, 4, 2, 5])
    >>> pairs.undo(pairs.apply(torch.arange(6)))
    tensor([0, 1, 2, 3, 4, 5])
    """

    @checked
    def apply(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Move `tensor` into this order: shape of the left side -> shape of the right side, contiguous.

        PatternError for a shape that does not fit. `out`: a contiguous tensor for the result, which is
        returned.
        """
        return reorder(self, tensor, out)

    def undo(self, tensor: Tensor) -> Tensor:
        """Invert `apply`: `tensor` of the right side's shape -> the left side's, contiguous."""
        return reorder(self, tensor, inverted=True)


@dataclass(frozen=True, eq=False)
class PackedCodes(CodesInWords):
    """Packed codes (R, C) in the `words` of a `packing`. `turned`: the words hold (C, R).

    `order`: row i (column i if `turned`) is row order[i] of the words.
    """

    @property
    def T(self) -> Self:
        """Transposed codes (C, R)."""
        return replace(self, turned=not self.turned)

    def __getitem__(self, rows: Tensor) -> PackedCodes | Tensor:
        """Gather rows: row i is row rows[i]. Transposed codes are unpacked first."""
        if self.turned:
            return self.plain()[rows]
        return replace(self, order=rows if self.order is None else self.order[rows])

    def plain(self) -> Tensor:
        """Unpack the codes to int32."""
        codes = devices.writable(self.words, self.packing.shape_of_codes(self.words.shape), torch.int32, None)
        devices.unpack(self.packing, self.words, codes)
        codes = codes if self.order is None else codes[self.order]
        return codes.T if self.turned else codes

    def values(self, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield values of codes by `lookup` in blocks of rows of `count` values, as `devices.values`."""
        if self.order is not None and not self.turned:  # gathered rows
            yield from devices.values(self.plain(), lookup, count)
            return
        for rows, codes in devices.rows_of_codes(self.packing, self.words, self.turned, count):
            ordered = codes if self.order is None else codes.index_select(1, self.order)
            yield rows, devices.stood_for(ordered, lookup)

    def dequantize(self, meaning: Meaning, out: Tensor) -> bool:
        """Dequantize words to `out` by `meaning` in one pass; False if this is not supported."""
        return devices.dequantize_words(self, meaning, out)


@dataclass(frozen=True, init=False)
class Packing(WordSentence):
    """Packing of codes of `bits` bits into int32 words; `pack` and `unpack` are exact inverses.

    PatternError where a run of codes does not fill its words, or the line is no permutation.

    Parameters
    ----------
    pattern
        An order as in `Order`; its last parenthesis fills words.
    fields
        Position of each code in a run of words; None: the codes one after another.
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
        """Wrap int32 `words` as packed codes, to repack or dequantize without unpacking."""
        _check_words(words)
        return PackedCodes(self, words)

    @checked
    def pack(self, codes: Tensor | LazyCodes, out: Tensor | None = None) -> Tensor:
        """Pack codes in [0, 2**bits) of any integer dtype, in plain order, into int32 words, new or `out`.

        ArgumentError if one of the `codes` is out of range; `out` stays unchanged then.
        """
        return pack_codes(self, codes, out)

    def unpack(self, words: Tensor, out: Tensor | None = None) -> Tensor:
        """Unpack int32 `words` to codes in [0, 2**bits) in plain order: int32, or `out`, int32 or uint8."""
        _check_words(words)
        dtype = torch.uint8 if isinstance(out, Tensor) and out.dtype == torch.uint8 else torch.int32
        codes = devices.writable(words, self.shape_of_codes(words.shape), dtype, out)
        devices.unpack(self, words, codes)
        return codes


def byte_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the value of each byte as a number of an 8-bit `dtype`: float32 (256,)."""
    return torch.arange(256, device=device).to(torch.uint8).view(dtype).float()


def reorder(order: Order, tensor: Tensor, out: Tensor | None = None, *, inverted: bool = False) -> Tensor:
    """Apply an order to a tensor, or undo it if `inverted`, without a check of the type of `out`."""
    source, target = (order.right, order.left) if inverted else (order.left, order.right)
    given: object = tensor
    if not isinstance(given, Tensor):
        raise ArgumentError("tensor", "a tensor", type(given).__name__)
    size = order.digits(tuple(tensor.shape), source)
    shape = [prod(size[digit] for digit in group) for group in target]
    wide = devices.writable(tensor, shape, tensor.dtype, out)
    devices.move(tensor, wide, size, source, target)
    return wide


def pack_codes(packing: Packing, codes: Tensor | LazyCodes, out: Tensor | None = None) -> Tensor:
    """Pack codes like `Packing.pack`, without a check of the arguments' types."""
    if isinstance(codes, Tensor):
        devices.check_integers(codes)
    shape = packing.shape_of_words(codes.shape)
    if isinstance(codes, PackedCodes):
        words = devices.writable(codes.words, shape, torch.int32, out)
        if devices.routines(words).repack(codes, packing, words):
            return words
    wide = devices.plain(codes)
    if wide.dtype != torch.int32 or out is not None:  # otherwise the packing checks them
        devices.check_codes(wide, packing.bits)
        wide = wide.to(torch.int32)
    words = devices.writable(wide, shape, torch.int32, out)
    devices.pack(packing, wide, words)
    return words


def _check_words(words: object) -> None:
    if not isinstance(words, Tensor):
        raise ArgumentError("words", "a tensor of dtype int32", type(words).__name__)
    if words.dtype != torch.int32:
        raise ArgumentError("words", "dtype int32", str(words.dtype).removeprefix("torch."))


@dataclass(frozen=True, eq=False)
class ClippedCodes:
    """The first rows and columns of `packed` codes, `shape` in all, without padding; still in words."""

    packed: PackedCodes
    shape: tuple[int, int]

    @property
    def T(self) -> ClippedCodes:
        """Transposed codes (C, R)."""
        return ClippedCodes(self.packed.T, self.shape[::-1])

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Gather rows, unpacked: row i is row rows[i]."""
        return self.plain()[rows]

    def plain(self) -> Tensor:
        """Unpack the codes to int32."""
        R, C = self.shape
        return self.packed.plain()[:R, :C]

    def values(self, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield values of codes by `lookup` in blocks of rows of `count` values, as `devices.values`."""
        R, C = self.shape
        for rows, values in self.packed.values(lookup, count):
            if rows.start < R:
                yield slice(rows.start, min(rows.stop, R)), values[: R - rows.start, :C].contiguous()

    def dequantize(self, meaning: Meaning, out: Tensor) -> bool:
        """Dequantize words to `out` by `meaning` in one pass; False if this is not supported."""
        return self.packed.order is None and self.packed.dequantize(meaning, out)
