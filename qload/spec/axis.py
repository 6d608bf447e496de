"""Axis text: size of a stored axis as a formula of the layer's logical sizes, and its valid cuts.

    axis := dim op* ["!"] ["|" free]    ops apply left to right to the logical size
    dim  := N | K | (NK) | P | free | integer
            (NK): all elements, row by row; P: one entry per fused part, stored as () or (1,);
            free (G R E ...): whole on every rank
    op   := *i | /i | /i^ | @i | @i^    @i: full runs of i (as /i*i); ^: a short tail is rounded up
    !    :  never cut      |G : whole on every rank if the cuts of the ranks are invalid for this axis

A cut is valid if every division of the axis is exact; the end of the dimension always is. A cut of N at n is
a cut of (NK) at element n * K; a cut of K at k has to be exact at k and at K.
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
    """Declared axis of a stored tensor: `"K*4/32"`, `"N"`, `"K/128^|G"`, `"16"`."""

    text: str

    def __post_init__(self) -> None:
        if not self._read:
            raise PatternError(
                self.text, "not an axis: a dimension, then *i, /i, /i^, @i or @i^, then ! or |G"
            )
        for op, amount, up in self.ops:
            if amount < 1 or (op == "*" and up):
                raise PatternError(self.text, f"{op}{amount}{'^' * up} is not an operation")

    def __reduce__(self) -> tuple[type["Axis"], tuple[str]]:
        """Pickle the text alone: a match of a pattern has no pickled form."""
        return Axis, (self.text,)

    @cached_property
    def _read(self) -> re.Match[str] | None:
        return _AXIS.fullmatch(self.text)

    @cached_property
    def dim(self) -> str:
        """Dimension of the formula: `N`, `K`, `NK`, `P`, a free letter, or an integer."""
        return self._part("dim").strip("()")

    @cached_property
    def flat(self) -> bool:
        """True if the axis counts all elements, row by row."""
        return self.dim == FLAT

    def follows(self, dim: str) -> bool:
        """Return whether the size depends on a dimension."""
        return self.dim == dim or (self.flat and dim in LOGICAL)

    def logical(self, sizes: Mapping[str, int]) -> int | None:
        """Logical size before the operations; None for an unknown dimension."""
        if self.dim.isdigit():
            return int(self.dim)
        if self.flat:
            return sizes["N"] * sizes["K"] if sizes.keys() >= LOGICAL else None
        return sizes.get(self.dim)

    def step(self, dim: str, sizes: Mapping[str, int]) -> int:
        """Step of valid cuts along a dimension of the formula; 0: no cut is valid."""
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
        """Operations as (operation, amount, rounded up), from left to right."""
        return tuple((op, int(amount), up == "^") for op, amount, up in _OP.findall(self._part("ops")))

    @cached_property
    def never(self) -> bool:
        """True if the axis forbids every cut of its dimension."""
        return self._part("never") == "!"

    @cached_property
    def free(self) -> str | None:
        """Letter of an axis that may stay whole despite a cut of its dimension; None for other axes."""
        return self._part("free") or None

    @cached_property
    def factor(self) -> Fraction:
        """Stored entries per logical entry, without rounding."""
        factor = Fraction(1)
        for op, amount, _ in self.ops:
            factor = factor * amount if op == "*" else factor / amount if op == "/" else factor
        return factor

    @cached_property
    def granule(self) -> int:
        """Smallest step with exact divisions."""
        return self._step(rounded=True)

    @cached_property
    def exact_step(self) -> int:
        """Smallest step of sizes: the divisions that are not rounded up are exact."""
        return self._step(rounded=False)

    def _step(self, *, rounded: bool) -> int:
        """Smallest step with exact divisions; `rounded`: also of divisions that are rounded up."""
        step, factor = 1, Fraction(1)
        for op, amount, up in self.ops:
            if op == "*":
                factor *= amount
                continue
            if rounded or not up:
                step = lcm(step, (factor / amount).denominator)
            factor = factor / amount if op == "/" else factor
        return step

    @cached_property
    def rounds(self) -> bool:
        """True if a short tail is rounded up, so that the stored size does not imply the logical size."""
        return any(up for _, _, up in self.ops)

    def size(self, logical: int) -> int | None:
        """Stored size; None for a division that is not exact, but has to be."""
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
        """Stored position of a valid cut at the logical position `place`."""
        end = self.size(logical)
        return end if place == logical and end is not None else int(place * self.factor)

    def _part(self, name: str) -> str:
        return (self._read[name] or "") if self._read else ""


@lru_cache(1 << 12)
def axes_of(text: str) -> tuple[Axis, ...]:
    """Parse `"K/8 N"` into its axes, outermost first; cached by text."""
    return tuple(map(Axis, text.split()))
