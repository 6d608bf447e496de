"""Conventions of stored zero points, a type for each.

`gptq_v2` stores the zero point, `gptq` (v1) the zero point minus one. For a zero point of 0 readers of v1
differ. gptqmodel 7.7.0 subtracts 1 from all fields of a word at once, with a borrow into the next field, and
adds it back the same way. Other programs subtract 1 from each field and wrap. ExLlama's kernels add 1 to each
field without a mask: 15 on disk is 16. All agree unless a stored field is 2**bits - 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from qload import devices
from qload.devices import ZeroRule
from qload.errors import ArgumentError, check_values, checked
from qload.layouts.packing import Packing
from qload.lazy_torch import Tensor, torch

_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def _check(words: object, packing: object) -> None:
    """Check argument types; `checked` would cost too much in every forward call."""
    if not isinstance(words, Tensor):
        raise ArgumentError("words", "a tensor of dtype int32", type(words).__name__)
    if not isinstance(packing, Packing):
        raise ArgumentError("packing", "a Packing", type(packing).__name__)


class ZeroPoints(ABC):
    """Convention of zero points in packed words.

    Contract: `write` is the inverse of `read` for every zero point within `span`. Messages use `name`.
    """

    name: ClassVar[str]

    def span(self, bits: int) -> tuple[int, int]:
        """Lowest and highest zero point of `bits` bits."""
        return 0, 2**bits - 1

    def middle(self, bits: int) -> int:
        """Stored field of the zero point 2**(bits - 1), for codes of `bits` bits."""
        return (1 << bits - 1) - 1

    @abstractmethod
    def rule(self, bits: int) -> ZeroRule:
        """Rule for one field of a word with codes of `bits` bits, as data for kernels."""

    @abstractmethod
    def read(self, words: Tensor, packing: Packing) -> Tensor:
        """Read int32 `words` in the order `packing`: zero points, int32, in plain order."""

    @abstractmethod
    def write(self, zeros: Tensor, packing: Packing) -> Tensor:
        """Write `zeros`, zero points in plain order, as words in the order `packing`; the inverse of `read`.

        ArgumentError for zero points of a float dtype or beyond `span`.
        """

    def _fields(self, zeros: Tensor, bits: int) -> Tensor:
        """Return the zero points less one, int32; ArgumentError for zero points beyond `span`."""
        check_values("zeros", zeros)
        devices.check_integers(zeros)
        low, high = self.span(bits)
        lowest, highest = map(int, zeros.aminmax()) if zeros.numel() else (low, high)
        if lowest < low or highest > high:
            raise ArgumentError("zeros", f"{low} <= zero <= {high}, {self.name}", f"{lowest} to {highest}")
        return zeros.to(torch.int32).sub(1)


@dataclass(frozen=True)
class Stored(ZeroPoints):
    """The zero point itself (AWQ, gptq_v2)."""

    name: ClassVar[str] = "stored"

    def middle(self, bits: int) -> int:
        """Return 2**(bits - 1), for codes of `bits` bits."""
        return 1 << bits - 1

    def rule(self, bits: int) -> ZeroRule:
        """A field is the zero point for any `bits`."""
        return ZeroRule()

    def read(self, words: Tensor, packing: Packing) -> Tensor:
        """Read int32 words: zero points in [0, 2**bits)."""
        _check(words, packing)
        return packing.unpack(words)

    @checked
    def write(self, zeros: Tensor, packing: Packing) -> Tensor:
        """Write `zeros` in [0, 2**bits) as int32 words."""
        check_values("zeros", zeros)
        return packing.pack(zeros)


@dataclass(frozen=True)
class StoredMinusOne(ZeroPoints):
    """The zero point minus one, subtracted from whole words as in gptqmodel (3 bits: per field)."""

    name: ClassVar[str] = "stored minus one"

    def rule(self, bits: int) -> ZeroRule:
        """Add 1 per field to whole words, with carries into the next field; for 3 `bits` to each field."""
        word_rule = ZeroRule(add_to_word=_ONES.get(bits, 0), mask=2**bits - 1)
        return word_rule if bits in _ONES else StoredMinusOnePerField().rule(bits)

    def read(self, words: Tensor, packing: Packing) -> Tensor:
        """Read int32 words: zero points in [0, 2**bits)."""
        _check(words, packing)
        if packing.bits in _ONES:
            return packing.unpack(words.add(_ONES[packing.bits]))
        return StoredMinusOnePerField().read(words, packing)

    @checked
    def write(self, zeros: Tensor, packing: Packing) -> Tensor:
        """Write `zeros` in [0, 2**bits) as int32 words."""
        check_values("zeros", zeros)
        if packing.bits in _ONES:
            return packing.pack(zeros).sub(_ONES[packing.bits])
        return StoredMinusOnePerField().write(zeros, packing)


STORED_MINUS_ONE = StoredMinusOne()  # GPTQ checkpoints but gptq_v2


@dataclass(frozen=True)
class StoredMinusOnePerField(ZeroPoints):
    """The zero point minus one, field by field, wrapped: TGI's conversion of AWQ to GPTQ."""

    name: ClassVar[str] = "stored minus one, per field"

    def rule(self, bits: int) -> ZeroRule:
        """Add 1 to each field of `bits` bits, with wrap-around."""
        return ZeroRule(add=1, mask=2**bits - 1)

    def read(self, words: Tensor, packing: Packing) -> Tensor:
        """Read int32 words: zero points in [0, 2**bits)."""
        _check(words, packing)
        return packing.unpack(words).add(1).remainder(2**packing.bits)

    @checked
    def write(self, zeros: Tensor, packing: Packing) -> Tensor:
        """Write `zeros` in [0, 2**bits) as int32 words."""
        return packing.pack(self._fields(zeros, packing.bits).remainder(2**packing.bits))


@dataclass(frozen=True)
class StoredMinusOneUnmasked(ZeroPoints):
    """The zero point minus one, field by field without wrapping, as in ExLlama's kernels: up to 2**bits."""

    name: ClassVar[str] = "stored minus one, unmasked"

    def span(self, bits: int) -> tuple[int, int]:
        """1 to 2**bits: 0 has no field."""
        return 1, 2**bits

    def rule(self, bits: int) -> ZeroRule:
        """Add 1 to each field without wrap-around."""
        return ZeroRule(add=1)

    def read(self, words: Tensor, packing: Packing) -> Tensor:
        """Read int32 words: zero points in [1, 2**bits]."""
        _check(words, packing)
        return packing.unpack(words).add(1)

    @checked
    def write(self, zeros: Tensor, packing: Packing) -> Tensor:
        """Write `zeros` in [1, 2**bits] as int32 words."""
        return packing.pack(self._fields(zeros, packing.bits))
