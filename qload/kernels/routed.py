"""The tokens of each expert: what a router chose, sorted by expert, on the host.

Which experts are to be multiplied has to be known there, so that the ids cross from a device once, and the
check of their range waits for nothing more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from torch import Tensor

from qload.errors import ArgumentError

Numbers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


@dataclass(frozen=True)
class RoutedTokens:
    """Pairs of a token and an expert that is here, by the number of the expert, then of the token.

    Attributes
    ----------
    places
        Of each expert that was chosen, where it is on this rank.
    counts
        How many of the pairs each has.
    tokens, slots
        Of each pair: topk_ids[token, slot] is the expert.
    """

    places: Sequence[int]
    counts: Sequence[int]
    tokens: Numbers
    slots: Numbers

    def runs(self, most: int) -> Iterator["RoutedTokens"]:
        """The same in runs of whole experts, of `most` pairs at most where one expert has no more."""
        first = start = stop = 0
        for at, count in enumerate(self.counts):
            if at > first and stop + count - start > most:
                yield self._part(slice(first, at), slice(start, stop))
                first, start = at, stop
            stop += count
        if self.counts:
            yield self._part(slice(first, None), slice(start, stop))

    def turns(self) -> list[Numbers]:
        """Pairs in which no token is twice, those of a token one after another in their order."""
        order = numpy.argsort(self.tokens, kind="stable")
        sorted_tokens = self.tokens[order]
        turn = numpy.empty_like(order)
        turn[order] = numpy.arange(len(order)) - numpy.searchsorted(sorted_tokens, sorted_tokens)
        return [numpy.flatnonzero(turn == one) for one in range(int(turn.max(initial=-1)) + 1)]

    def _part(self, experts: slice, pairs: slice) -> "RoutedTokens":
        own = self.places[experts], self.counts[experts]
        return RoutedTokens(*own, self.tokens[pairs], self.slots[pairs])


def routed(topk_ids: Tensor, places: Sequence[int]) -> RoutedTokens:
    """The pairs of all experts that are here and were chosen.

    `topk_ids`: (T, k), whose numbers index `places`: where an expert is on this rank, -1 if it is not here.
    ArgumentError for a number of no expert.
    """
    ids = topk_ids.detach().cpu().numpy().astype(numpy.int64)
    _check(ids, len(places))
    flat, place = ids.reshape(-1), numpy.asarray(places, numpy.int64)
    order = numpy.argsort(flat, kind="stable")
    order = order[place[flat[order]] >= 0]
    experts = flat[order]
    starts = numpy.flatnonzero(numpy.diff(experts, prepend=-1))
    counts = numpy.diff(starts, append=len(order))
    tokens, slots = numpy.divmod(order, max(1, ids.shape[1]))
    return RoutedTokens(place[experts[starts]].tolist(), counts.tolist(), tokens, slots)


def _check(ids: Numbers, total: int) -> None:
    wrong = numpy.argwhere((ids < 0) | (ids >= total)).tolist()
    if wrong:
        token, slot = wrong[0]
        got = f"{ids[token, slot]} at ({token}, {slot})" + (f" ({len(wrong)} in all)" if wrong[1:] else "")
        raise ArgumentError("topk_ids", f"numbers of experts, 0 to {total - 1}", got)
