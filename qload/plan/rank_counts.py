"""Numbers of ranks that suit every layer of a checkpoint, and the layers that rule out the others."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from qload.loader.sharding import WORLDS

CANDIDATES = (1, *WORLDS)  # numbers of ranks to check


@dataclass(frozen=True)
class LawfulRanks:
    """Numbers of ranks that suit every layer, from `CANDIDATES`.

    Attributes
    ----------
    ranks
        The numbers, in ascending order.
    limits
        For a few layers that together rule out all other numbers: the numbers that each allows, by name.
    """

    ranks: tuple[int, ...]
    limits: Mapping[str, tuple[int, ...]]

    def text(self) -> str:
        """Return the numbers and the layers as one sentence.

        Examples
        --------
        >>> lawful_ranks({"up": (1, 2, 3), "down": (1, 2)}).text()
        '1 or 2 ranks suit all layers: down allows 1 or 2'
        """
        suits = "rank suits" if self.ranks == (1,) else "ranks suit"
        limits = ", ".join(f"{name} allows {_join(allowed)}" for name, allowed in self.limits.items())
        return f"{_join(self.ranks)} {suits} all layers" + (f": {limits}" if limits else "")


def lawful_ranks(allowed: Mapping[str, Collection[int]]) -> LawfulRanks | None:
    """Intersect the numbers of `CANDIDATES` that layers allow, by name; None if no number suits all."""
    left, limits = list(CANDIDATES), dict[str, tuple[int, ...]]()
    while any(ranks not in numbers for numbers in allowed.values() for ranks in left):
        name = min(allowed, key=lambda name: len({*left} & {*allowed[name]}))
        left = [ranks for ranks in left if ranks in allowed[name]]
        limits[name] = tuple(sorted(allowed[name]))
    return LawfulRanks(tuple(left), limits) if left else None


def _join(numbers: tuple[int, ...]) -> str:
    """(1, 2, 4) -> '1, 2 or 4'."""
    *rest, last = map(str, numbers)
    return f"{', '.join(rest)} or {last}" if rest else last
