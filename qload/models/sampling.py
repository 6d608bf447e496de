"""Which token comes next: the likeliest, or one drawn from the likely ones.

    p = softmax(logits / temperature)
    top-k: the k likeliest are kept; top-p: of these as few, likeliest first, as have p of their probability
    the token: the first whose cumulative probability exceeds u times the sum, with u of [0, 1)

The numbers u come from the seed and from which sequence it is: a sequence has the same numbers alone and
among others, on the CPU and on a GPU, and sums are float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from random import Random

import torch
from torch import Tensor

from qload.errors import ArgumentError, check_fields

NOT_FINITE = -1  # in the place of a token, where no logit is the largest


@dataclass(frozen=True)
class Sampler:
    """How a token is chosen of logits; by default the one with the largest. ArgumentError for other values.

    Attributes
    ----------
    temperature
        What logits are divided by, at least 0; 0 takes the largest and draws nothing.
    top_k
        How many of the likeliest tokens are kept, at least 1; None keeps all.
    top_p
        Which share of the probability of those is kept, 0 < top_p <= 1.
    seed
        What the numbers come from that tokens are drawn by.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.temperature < float("inf"):
            raise ArgumentError("temperature", "a finite number of at least 0", str(self.temperature))
        if self.top_k is not None and self.top_k < 1:
            raise ArgumentError("top_k", "at least 1", str(self.top_k))
        if not 0 < self.top_p <= 1:
            raise ArgumentError("top_p", "more than 0, at most 1", str(self.top_p))

    def numbers(self, sequence: int) -> Iterator[float]:
        """The numbers of [0, 1) that tokens of sequence number `sequence` are drawn by, one after another."""
        if not self.temperature:
            return repeat(0.0)
        drawn = Random(f"{self.seed} {sequence}")
        return (drawn.random() for _ in repeat(None))

    def choose(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """The ids (S,), int64, that `logits` (S, vocab) and `numbers` (S,) of [0, 1) choose.

        NOT_FINITE where the largest logit is no finite number.
        """
        if not self.temperature:
            return likeliest(logits)
        largest = logits.max(-1).values
        ids = self._drawn(logits.double() - largest.double()[:, None], numbers.double())
        return _where_finite(ids, largest)

    def _drawn(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Logits of at most 0, (S, vocab) -> ids (S,)."""
        sorted_logits, order = (logits / self.temperature).sort(stable=True, dim=-1, descending=True)
        p = sorted_logits[:, : self.top_k].softmax(-1)
        before = p.cumsum(-1) - p
        kept = torch.where(before < self.top_p, p, 0)
        # In the order of ids: logits that are nearly equal may change places as sums are rounded.
        sums = torch.zeros_like(logits).scatter(-1, order[:, : kept.shape[1]], kept).cumsum(-1)
        whole = sums[:, -1:]
        at = torch.searchsorted(sums, numbers[:, None] * whole, right=True)
        last = (sums < whole).sum(-1, keepdim=True)  # where a product is rounded up to the sum
        return at.minimum(last)[:, 0]


def likeliest(logits: Tensor) -> Tensor:
    """The ids (S,), int64, of the largest of `logits` (S, vocab); NOT_FINITE where that is not finite."""
    largest, ids = logits.max(-1)
    return _where_finite(ids, largest)


def _where_finite(ids: Tensor, largest: Tensor) -> Tensor:
    return ids.masked_fill(~largest.isfinite(), NOT_FINITE)


GREEDY = Sampler()
