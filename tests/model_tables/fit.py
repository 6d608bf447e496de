"""Expressions and conditions that explain samples: smallest ones first, and none without an explanation."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

FACTORS = (1, 2, 3, 4, 5, 6, 8)
DIVISORS = (2, 4, 8, 16, 32)
MAX_CONSTANT = 8  # a larger one that a size explains is the size
MIN_SAMPLES = 8  # of a larger constant
MAX_LITERALS = 3  # of a conjunction
MAX_VARIABLES = 40

Values = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Expressions:
    """Products of sizes with their values in some samples, the simplest first.

    Values are compared by a linear hash, so that a sum of two products has the sum of their hashes.
    """

    texts: list[str]
    hashes: Values
    simple: int  # number of products of at most two factors
    weights: Values
    known: dict[tuple[int, ...], str | None] = field(default_factory=dict)  # explained values

    @classmethod
    def of(cls, sizes: Mapping[str, Sequence[int]], samples: int) -> "Expressions":
        """Products of sizes; `sizes`: name -> value in each sample."""
        weights = np.random.default_rng(1).integers(1 << 40, 1 << 60, samples, np.int64) | 1
        names = list(sizes)[:MAX_VARIABLES]
        values = [np.array(sizes[name], np.int64) for name in names]
        found: dict[int, str] = {}

        def add(text: str, value: Values) -> None:
            found.setdefault(int((value * weights).sum()), text)

        for name, value in zip(names, values, strict=True):
            add(name, value)
        for factor in FACTORS[1:]:
            for name, value in zip(names, values, strict=True):
                add(f"{factor}*{name}", factor * value)
        pairs = list(combinations(range(len(names)), 2))
        for left, right in pairs:
            add(f"{names[left]}*{names[right]}", values[left] * values[right])
        quotients = []
        for top, value in enumerate(values):
            for bottom, other in enumerate(values):
                if (
                    top != bottom
                    and (other > 0).all()
                    and (value // other > 0).all()
                    and (value // other != 1).any()
                ):
                    quotients.append((top, bottom))
                    text = f"{names[top]}/{names[bottom]}"
                    add(text, value // other)
                    add(f"{text}*{text}", value // other * value // other)
            for divisor in DIVISORS:
                add(f"{names[top]}/{divisor}", value // divisor)
        for factor in FACTORS[1:4]:
            for left, right in pairs:
                add(f"{factor}*{names[left]}*{names[right]}", factor * values[left] * values[right])
        simple = len(found)
        for top, bottom in quotients:
            for other, value in enumerate(values):
                add(f"{names[top]}/{names[bottom]}*{names[other]}", values[top] // values[bottom] * value)
                if other != bottom:
                    text = f"{names[top]}*{names[other]}/{names[bottom]}"
                    add(text, values[top] * value // values[bottom])
        for one, two, three in combinations(range(len(names)), 3):
            add(f"{names[one]}*{names[two]}*{names[three]}", values[one] * values[two] * values[three])
        return cls(list(found.values()), np.fromiter(found, np.int64), simple, weights)

    @cached_property
    def places(self) -> Mapping[int, int]:
        """Numbers of the products by their hashes."""
        return {int(value): at for at, value in enumerate(self.hashes)}

    def explain(self, target: Sequence[int]) -> str | None:
        """Return the simplest sum of products with these values; None without one."""
        if tuple(target) not in self.known:
            self.known[tuple(target)] = self._explain(np.array(target, np.int64))
        return self.known[tuple(target)]

    def _explain(self, values: Values) -> str | None:
        wanted = int((values * self.weights).sum())
        at = self.places.get(wanted)
        if (values == values[0]).all():
            if at is not None and values[0] > MAX_CONSTANT and re.fullmatch(r"[\w.]+", self.texts[at]):
                return self.texts[at]
            return str(values[0]) if values[0] <= MAX_CONSTANT or len(values) >= MIN_SAMPLES else None
        if at is not None:
            return self.texts[at]
        return self._sum_of_two(wanted) or self._sum_of_three(wanted)

    def _sum_of_two(self, wanted: int) -> str | None:
        total = int(self.weights.sum())
        for constant in (1, 2, 3, 4, 8, 16):
            rest = _wrap(wanted - constant * total)
            if (other := self.places.get(rest)) is not None:
                return f"{self.texts[other]}+{constant}"
        with np.errstate(over="ignore"):
            rests = np.int64(wanted) - self.hashes[: self.simple]
        for at, rest in enumerate(rests):
            if (other := self.places.get(int(rest))) is not None:
                return f"{self.texts[at]}+{self.texts[other]}"
        return None

    def _sum_of_three(self, wanted: int) -> str | None:
        hashes = self.hashes[: self.simple]
        sums = hashes[:, None] + hashes[None, :]
        rests = np.int64(wanted) - sums
        hits = np.isin(rests, hashes)
        for left, right in np.argwhere(hits):
            third = self.places[int(rests[left, right])]
            return "+".join(self.texts[at] for at in sorted((int(left), int(right), third)))
        return None


def _wrap(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


Truths = np.ndarray[Any, np.dtype[np.bool_]]


def conjunctions(target: Truths, literals: Mapping[str, Truths]) -> Iterator[tuple[str, ...]]:
    """Yield smallest conjunctions of literals with the values of `target`."""
    if target.all():
        yield ()
        return
    implied = [(text, value) for text, value in literals.items() if value[target].all() and not value.all()]
    for count in range(1, MAX_LITERALS + 1):
        found = False
        for chosen in combinations(implied, count):
            value = chosen[0][1]
            for _, other in chosen[1:]:
                value = value & other
            if (value == target).all():
                found = True
                yield tuple(text for text, _ in chosen)
        if found:
            return
