"""Conventions of stored zero points, a type for each."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qload import devices
from qload.devices import ZeroRule
from qload.errors import ArgumentError, check_values, checked
from qload.layouts.packing import Packing

_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def _check(words: object, packing: object) -> None:
    """Of types that can be read; said without `checked`, as weights read zero points on every call."""
    if not isinstance(words, Tensor):
        raise ArgumentError("words", "a tensor of dtype int32", type(words).__name__)
    if not isinstance(packing, Packing):
        raise ArgumentError("packing", "a Packing", type(packing).__name__)


class ZeroPoints(ABC):
    """How zero points are written in packed words.

    An implementer promises that `write` is the inverse of `read` for every zero point within `span`. `name`
    is what messages call it.
    """

    name: ClassVar[str]

    def span(self, bits: int) -> tuple[int, int]:
        """The lowest and the highest zero point that can be said in `bits` bits."""
        return 0, 2**bits - 1

    @abstractmethod
    def rule(self, bits: int) -> ZeroRule:
        """The same as data: how a field of a word is read, of codes of so many `bits`."""

    @abstractmethod
    def read(self, words: Tensor, packing: Packing) -> Tensor:
        """int32 `words` in an order `packing` -> zero points, int32, in plain order."""

    @abstractmethod
    def write(self, zeros: Tensor, packing: Packing) -> Tensor:
        """Zero points `zeros` in plain order -> int32 words in an order `packing`; the inverse of `read`.

        ArgumentError for zero points that are no integers, or beyond `span`.
        """

    def _fields(self, zeros: Tensor, bits: int) -> Tensor:
        """Return the zero points less one, int32; ArgumentError for zero points beyond `span`."""
        check_values("zeros", zeros)
        devices.check_integers(zeros)
        low, high = self.span(bits)
        least, most = map(int, zeros.aminmax()) if zeros.numel() else (low, high)
        if least < low or most > high:
            raise ArgumentError("zeros", f"{low} <= zero <= {high}, {self.name}", f"{least} to {most}")
        return zeros.to(torch.int32).sub(1)


@dataclass(frozen=True)
class Stored(ZeroPoints):
    """The zero point itself (AWQ, gptq_v2)."""

    name: ClassVar[str] = "stored"

    def rule(self, bits: int) -> ZeroRule:
        """A field is the zero point, whatever the `bits`."""
        return ZeroRule()

    def read(self, words: Tensor, packing: Packing) -> Tensor:
        """int32 words -> zero points in [0, 2**bits)."""
        _check(words, packing)
        return packing.unpack(words)

    @checked
    def write(self, zeros: Tensor, packing: Packing) -> Tensor:
        """Zero points in [0, 2**bits) -> int32 words."""
        check_values("zeros", zeros)
        return packing.pack(zeros)


@dataclass(frozen=True)
class StoredMinusOne(ZeroPoints):
    """The zero point minus one, taken from whole words as gptqmodel writes it (3 bits: per field)."""

    name: ClassVar[str] = "stored minus one"

    def rule(self, bits: int) -> ZeroRule:
        """Words are added to, whose carries run into the next field; of 3 `bits` each field."""
        whole = ZeroRule(add_to_word=_ONES.get(bits, 0), mask=2**bits - 1)
        return whole if bits in _ONES else StoredMinusOnePerField().rule(bits)

    def read(self, words: Tensor, packing: Packing) -> Tensor:
        """int32 words -> zero points in [0, 2**bits)."""
        _check(words, packing)
        if packing.bits in _ONES:
            return packing.unpack(words.add(_ONES[packing.bits]))
        return StoredMinusOnePerField().read(words, packing)

    @checked
    def write(self, zeros: Tensor, packing: Packing) -> Tensor:
        """Zero points in [0, 2**bits) -> int32 words."""
        check_values("zeros", zeros)
        if packing.bits in _ONES:
            return packing.pack(zeros).sub(_ONES[packing.bits])
        return StoredMinusOnePerField().write(zeros, packing)


STORED_MINUS_ONE = StoredMinusOne()  # what GPTQ checkpoints mean unless they say gptq_v2


@dataclass(frozen=True)
class StoredMinusOnePerField(ZeroPoints):
    """The zero point minus one, field by field and wrapped: TGI's way to write AWQ's as GPTQ's."""

    name: ClassVar[str] = "stored minus one, per field"

    def rule(self, bits: int) -> ZeroRule:
        """1 is added to each field of so many `bits`, which wraps."""
        return ZeroRule(add=1, mask=2**bits - 1)

    def read(self, words: Tensor, packing: Packing) -> Tensor:
        """int32 words -> zero points in [0, 2**bits)."""
        _check(words, packing)
        return packing.unpack(words).add(1).remainder(2**packing.bits)

    @checked
    def write(self, zeros: Tensor, packing: Packing) -> Tensor:
        """Zero points in [0, 2**bits) -> int32 words."""
        return packing.pack(self._fields(zeros, packing.bits).remainder(2**packing.bits))


@dataclass(frozen=True)
class StoredMinusOneUnmasked(ZeroPoints):
    """The zero point minus one, field by field, as ExLlama's kernels read it: up to 2**bits."""

    name: ClassVar[str] = "stored minus one, unmasked"

    def span(self, bits: int) -> tuple[int, int]:
        """0 cannot be said, 2**bits can."""
        return 1, 2**bits

    def rule(self, bits: int) -> ZeroRule:
        """1 is added to each field of so many `bits`, which does not wrap."""
        return ZeroRule(add=1)

    def read(self, words: Tensor, packing: Packing) -> Tensor:
        """int32 words -> zero points in [1, 2**bits]."""
        _check(words, packing)
        return packing.unpack(words).add(1)

    @checked
    def write(self, zeros: Tensor, packing: Packing) -> Tensor:
        """Zero points in [1, 2**bits] -> int32 words."""
        return packing.pack(self._fields(zeros, packing.bits))
