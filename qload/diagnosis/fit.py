"""How well a fault explains what came out: how much of it, and how much of that chance would too."""

from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from qload.diagnosis.case import Candidate, Case
from qload.diagnosis.closeness import Closeness

EVIDENCE = 20.0  # nats: a fault that explains what chance explains once in 5e8 is told, of some hundred
LEAST = 6  # wrong places that a fault has to explain
ENOUGH = 0.9  # of the wrong numbers: what a fault that is named explains
SAMPLE = 2048  # wrong places that a fault is tried on before all are looked at
HOPELESS = ENOUGH / 2  # of a sample: of 2048 at random, a fault that explains nine tenths never has so few


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


def sample_of(wrong: Tensor) -> tuple[Tensor, Tensor]:
    """Which wrong places, bool (N, K), are looked at first: rows and columns, int64, of `SAMPLE` at most."""
    rows, columns = wrong.nonzero().unbind(1)
    if rows.numel() > SAMPLE:
        chosen = torch.randint(rows.numel(), (SAMPLE,), generator=torch.Generator().manual_seed(0))
        rows, columns = (places[chosen.to(wrong.device)] for places in (rows, columns))
    return rows, columns


def fitted(
    case: Case,
    candidate: Candidate,
    wrong: Tensor,
    closeness: Closeness,
    sample: tuple[Tensor, Tensor],
) -> Fit | None:
    """A fault, taken to be there in the outputs and inputs that have wrong numbers and nowhere else.

    `wrong`: where `got` is not what is expected, bool (N, K); `sample`: what `sample_of` chose of it. None
    for a fault that explains less than `ENOUGH` of it, or predicts too little of it.
    """
    predicted = candidate.predicted().float()
    first = predicted[sample]
    agreeing = closeness(first, case.got[sample]) | first.isnan()  # NaN says nothing, and is counted below
    if float(agreeing.double().mean()) < HOPELESS:
        return None
    known = ~predicted.isnan() | case.expected.isnan()
    told = wrong & known
    total = int(told.sum())
    if total < LEAST or 2 * total < int(wrong.sum()):
        return None
    fits = closeness(predicted, case.got) & (_nearer(predicted, case) | ~wrong)
    inside = wrong.any(1)[:, None] & wrong.any(0)[None]
    left = int((inside & known & ~fits).sum())
    share = 1 - left / total
    explained = int((told & fits).sum())
    if share < ENOUGH:
        return None
    evidence = explained * -log(max(_chance(predicted[told], case.got[told], closeness), 1e-9))
    extent = known & ~closeness(predicted, case.expected)
    return Fit(candidate, share, evidence if explained >= LEAST else -inf, extent)


def _nearer(predicted: Tensor, case: Case) -> Tensor:
    """Where a fault comes nearer to what came out than no fault does, or one of the three is no number."""
    return ~((predicted - case.got).abs() >= (case.expected - case.got).abs()) | (predicted == case.got)


def _chance(predicted: Tensor, got: Tensor, closeness: Closeness) -> float:
    """How many of the numbers would agree if they stood in any order; one more than were found."""
    order = torch.randperm(got.numel(), generator=torch.Generator().manual_seed(0)).to(got.device)
    return (int(closeness(predicted, got[order]).sum()) + 1) / (got.numel() + 1)
