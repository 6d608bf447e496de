"""Which pages of a cache each sequence has, on the host: slots for new tokens, and tables for a step."""

from collections.abc import Sequence

NOBODYS = 0  # a page that no sequence is given: tables are filled up with it


def page_count(sequences: int, tokens: int, page_size: int) -> int:
    """How many pages a cache needs for so many sequences of so many tokens each, and nobody's."""
    return 1 + sequences * -(-tokens // page_size)


class PageTable:
    """Pages of a cache, given to sequences as they grow.

    Parameters
    ----------
    sequences, tokens
        How many sequences there are at once, and how many tokens each has at most.
    page_size
        How many tokens a page holds.
    """

    def __init__(self, sequences: int, tokens: int, page_size: int) -> None:
        self.page_size: int = page_size
        self.width: int = -(-tokens // page_size)  # pages of a sequence at most
        self.pages: int = page_count(sequences, tokens, page_size)
        self._free = list(range(self.pages - 1, NOBODYS, -1))  # the lowest number is given first
        self._held: list[list[int]] = [[] for _ in range(sequences)]
        self._lengths = [0] * sequences

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        return self._lengths[sequence]

    def restart(self, sequence: int) -> list[int]:
        """The sequence has no tokens any more, and its pages are free: which those are."""
        freed = self._held[sequence]
        self._free.extend(reversed(freed))
        self._held[sequence], self._lengths[sequence] = [], 0
        return freed

    def grow(self, sequence: int, tokens: int) -> tuple[list[int], list[int]]:
        """The positions of so many new tokens, and the slots of the cache that they are given."""
        positions = list(range(self._lengths[sequence], self._lengths[sequence] + tokens))
        held, size = self._held[sequence], self.page_size
        while len(held) * size <= positions[-1]:
            held.append(self._free.pop())
        self._lengths[sequence] += tokens
        return positions, [held[at // size] * size + at % size for at in positions]

    def table(self, sequences: Sequence[int], width: int | None = None) -> list[list[int]]:
        """A row of pages for each of the sequences, as wide as the longest needs, or `width`."""
        held = [self._held[sequence] for sequence in sequences]
        wide = max(map(len, held)) if width is None else width
        return [pages + [NOBODYS] * (wide - len(pages)) for pages in held]
