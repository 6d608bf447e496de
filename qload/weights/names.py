"""The names of a checkpoint in order, so that what is missing is looked for near where it would be."""

from bisect import bisect_left
from collections.abc import Iterable

FEW = 1 << 12  # names, of which all can be compared with one that is missing
LAST = "\U0010ffff"  # is after every letter of a name
NEAR = 64  # names before and after it, where there are more


class SortedNames:
    """Sorted once; then what stands under a prefix is found without a look at all the others."""

    def __init__(self, names: Iterable[str]) -> None:
        self._sorted = sorted(names)

    def under(self, *leads: str, most: int = 6) -> list[str]:
        """The first names that begin with one of these, in order."""
        found: set[str] = set()
        for lead in leads:
            at = bisect_left(self._sorted, lead)
            found.update(name for name in self._sorted[at : at + most] if name.startswith(lead))
        return sorted(found)[:most]

    def all_under(self, lead: str) -> list[str]:
        """All names that begin with a lead, in order."""
        start, stop = (bisect_left(self._sorted, end) for end in (lead, lead + LAST))
        return self._sorted[start:stop]

    def near(self, name: str) -> list[str]:
        """The names that one which is missing may be taken for: all, or of many those beside it."""
        if len(self._sorted) <= FEW:
            return self._sorted
        at = bisect_left(self._sorted, name)
        return self._sorted[max(0, at - NEAR) : at + NEAR]
