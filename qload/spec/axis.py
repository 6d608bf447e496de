"""Axis text: how a stored axis follows from a layer's logical sizes, and where it may be cut.

    axis := dim op* ["!"] ["|" free]    ops apply left to right to the logical size
    dim  := N | K | (NK) | P | free | integer
            (NK): all elements, row by row; P: one entry a fused part, stored as () or (1,);
            free (G R E ...): whole on every rank
    op   := *i | /i | /i^ | @i | @i^    @i: whole runs of i (as /i*i); ^: a short tail is rounded up
    !    :  never cut      |G : where the world's cuts do not suit this axis, it stays whole

A cut is lawful where every division of the axis is exact; the end of the dimension always is. A cut of N
at n is one of (NK) at element n * K; a cut of K at k has to be exact at k and at K.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import gcd, lcm

from qload.errors import PatternError

LOGICAL = frozenset("NK")
FLAT = "NK"
PARTS = "P"

_AXIS = re.compile(r"(?P<dim>[A-Z]|\d+|\(NK\))(?P<ops>(?:[*/@]\d+\^?)*)(?P<never>!?)(?:\|(?P<free>[A-Z]))?")
_OP = re.compile(r"([*/@])(\d+)(\^?)")


@dataclass(frozen=True)
class Axis:
    """One axis of a stored tensor, as declared: `"K*4/32"`, `"N"`, `"K/128^|G"`, `"16"`."""

    text: str

    def __post_init__(self) -> None:
        if not self._read:
            raise PatternError(
                self.text, "not an axis: a dimension, then *i, /i, /i^, @i or @i^, then ! or |G"
            )
        for op, amount, up in self.ops:
            if amount < 1 or (op == "*" and up):
                raise PatternError(self.text, f"{op}{amount}{'^' * up} is not an operation")

    @cached_property
    def _read(self) -> re.Match[str] | None:
        return _AXIS.fullmatch(self.text)

    @cached_property
    def dim(self) -> str:
        """The dimension it follows from: `N`, `K`, `NK`, `P`, a free letter, or an integer."""
        return self._part("dim").strip("()")

    @cached_property
    def flat(self) -> bool:
        """Whether it counts all elements, row by row."""
        return self.dim == FLAT

    def follows(self, dim: str) -> bool:
        """Whether its size follows from a dimension."""
        return self.dim == dim or (self.flat and dim in LOGICAL)

    def logical(self, sizes: Mapping[str, int]) -> int | None:
        """The logical size its operations start from, or None where a dimension is not known."""
        if self.dim.isdigit():
            return int(self.dim)
        if self.flat:
            return sizes["N"] * sizes["K"] if sizes.keys() >= LOGICAL else None
        return sizes.get(self.dim)

    def step(self, dim: str, sizes: Mapping[str, int]) -> int:
        """Cuts of a dimension it follows from are exact at multiples of this; 0: there are none."""
        if self.never:
            return 0
        if not self.flat:
            return self.granule
        row = sizes["K"]
        if dim == "N":
            return self.granule // gcd(self.granule, row)
        return 0 if row % self.granule else self.granule

    @cached_property
    def ops(self) -> tuple[tuple[str, int, bool], ...]:
        """(operation, amount, rounded up) from left to right."""
        return tuple((op, int(amount), up == "^") for op, amount, up in _OP.findall(self._part("ops")))

    @cached_property
    def never(self) -> bool:
        """Whether this axis forbids every cut of its dimension."""
        return self._part("never") == "!"

    @cached_property
    def free(self) -> str | None:
        """The letter that names this axis where it stays whole although its dimension is cut."""
        return self._part("free") or None

    @cached_property
    def factor(self) -> Fraction:
        """Stored places for each logical one, rounding aside."""
        factor = Fraction(1)
        for op, amount, _ in self.ops:
            factor = factor * amount if op == "*" else factor / amount if op == "/" else factor
        return factor

    @cached_property
    def granule(self) -> int:
        """The smallest step at which every division is exact."""
        step, factor = 1, Fraction(1)
        for op, amount, _ in self.ops:
            if op == "*":
                factor *= amount
            else:
                step = lcm(step, (factor / amount).denominator)
                factor = factor / amount if op == "/" else factor
        return step

    @cached_property
    def rounds(self) -> bool:
        """Whether a short tail is rounded up, so that the stored size does not tell the logical one."""
        return any(up for _, _, up in self.ops)

    def size(self, logical: int) -> int | None:
        """The stored size, or None where a division that has to be exact is not."""
        size = logical
        for op, amount, up in self.ops:
            if op == "*":
                size *= amount
                continue
            if size % amount and not up:
                return None
            runs = -(-size // amount)
            size = runs if op == "/" else runs * amount
        return size

    def at(self, place: int, logical: int) -> int:
        """Where a lawful cut at `place` falls on the stored axis."""
        end = self.size(logical)
        return end if place == logical and end is not None else int(place * self.factor)

    def _part(self, name: str) -> str:
        return (self._read[name] or "") if self._read else ""


@lru_cache(1 << 12)
def axes_of(text: str) -> tuple[Axis, ...]:
    """`"K/8 N"` -> the two axes, outermost first; whoever asks for equal text gets the same ones."""
    return tuple(Axis(each) for each in text.split())
