"""How well a fault explains what came out: how much of it, and how much of that chance would too."""

from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from qload.diagnosis.case import Candidate, Case
from qload.diagnosis.closeness import Closeness

EVIDENCE = 20.0  # nats: a fault that explains what chance explains once in 5e8 is told, of some hundred
LEAST = 6  # wrong places that a fault has to explain


@dataclass(frozen=True)
class Fit:
    """A fault beside what came out.

    Attributes
    ----------
    candidate
        The fault.
    share
        Of the wrong numbers: what is left once the fault is taken into account, from one.
    evidence
        In nats: against its numbers standing there by chance.
    extent
        Where it changes anything at all, bool (N, K).
    """

    candidate: Candidate
    share: float
    evidence: float
    extent: Tensor


def fitted(case: Case, candidate: Candidate, wrong: Tensor, closeness: Closeness) -> Fit | None:
    """A fault, taken to be there in the outputs and inputs that have wrong numbers and nowhere else.

    `wrong`: where `got` is not what is expected, bool (N, K).
    """
    predicted = candidate.predicted().float()
    known = ~predicted.isnan() | case.expected.isnan()
    told = wrong & known
    total = int(told.sum())
    if total < LEAST or 2 * total < int(wrong.sum()):
        return None
    fits = closeness(predicted, case.got)
    inside = wrong.any(1)[:, None] & wrong.any(0)[None]
    left = int((inside & known & ~fits).sum())
    share = 1 - left / total
    explained = int((told & fits).sum())
    if share <= 0:
        return None
    evidence = explained * -log(max(_chance(predicted[told], case.got[told], closeness), 1e-9))
    extent = known & ~closeness(predicted, case.expected)
    return Fit(candidate, share, evidence if explained >= LEAST else -inf, extent)


def _chance(predicted: Tensor, got: Tensor, closeness: Closeness) -> float:
    """How many of the numbers would agree if they stood in any order; one more than were found."""
    order = torch.randperm(got.numel(), generator=torch.Generator().manual_seed(0)).to(got.device)
    return (int(closeness(predicted, got[order]).sum()) + 1) / (got.numel() + 1)
