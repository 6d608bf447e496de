"""Pairs of a token and an expert that it chose, sorted by expert on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qload.kernels.cuda.experts_call import ExpertsCall
from qload.kernels.cuda.module import native, pointer, stream


@dataclass(frozen=True)
class SortedPairs:
    """Pairs by expert, and items of up to `tokens` of them.

    `order` (pairs,): -1 at the end, of pairs whose experts are elsewhere. `places` (pairs,): where each is in
    it, -1: nowhere. `items` (most + 1, 4 + tokens): expert, first place, count, items in all, and the pairs;
    behind the last, counts of -1. None where each pair is an item of its own.
    """

    order: Tensor | None
    places: Tensor | None
    items: Tensor | None
    most: int


def unsorted(call: ExpertsCall) -> SortedPairs:
    """Each pair by itself: nothing to launch, but a matrix is read once for each of its pairs."""
    return SortedPairs(None, None, None, call.pairs)


def sorted_pairs(call: ExpertsCall, tokens: int, placed: bool = False) -> SortedPairs:
    """One launch; `tokens`: the most of an item, a multiple of 4. `placed`: with `order` and `places`."""
    pairs, experts = call.pairs, min(call.pairs, call.down.experts)
    most = (pairs + experts * (tokens - 1)) // tokens  # whole items, and one of each expert that is not
    items = call.ids.new_empty((most + 1, 4 + tokens), dtype=torch.int32)
    order, places = call.ids.new_empty((2, pairs), dtype=torch.int32) if placed else (None, None)
    sizes = [*call.counts, tokens, most]
    native().sort_by_expert(
        *map(pointer, (call.ids, call.map)),
        call.wide,
        *map(pointer, (order, places, items)),
        sizes,
        stream(call.x),
    )
    return SortedPairs(order, places, items, most)
