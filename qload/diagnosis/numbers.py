"""Faults that are seen in the numbers alone: one factor, a bias, zeros, NaN, infinities."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from qload.diagnosis.case import Candidate, Case

FACTOR = 2.0**-8  # how near a factor is to one that is known
ONE_KIND = 0.9  # of the wrong places: those that are no number, or zero
LEAST = 4  # places


def factors(case: Case, wrong: Tensor) -> Iterator[Candidate]:
    """One factor on all numbers, or the factors of inputs or of the whole tensor."""
    if (own := case.factors) is not None:
        plain = case.expected / own
        yield Candidate("input-factors", "inputs not multiplied by their factors", lambda: plain)
        twice = case.expected * own
        yield Candidate("input-factors", "inputs multiplied by their factors twice", lambda: twice)
        yield Candidate("input-factors", "inputs divided by their factors", lambda: plain / own)
    ratio = _ratio(case, wrong)
    if ratio is None:
        return
    for name, value in case.scalars:
        known = (
            (1 / value if value else 0.0, "missing"),
            (value, "applied twice"),
            (value**-2 if value else 0.0, "inverted"),
        )
        for factor, words in known:
            if factor and factor != 1 and abs(ratio - factor) <= FACTOR * abs(factor):
                yield Candidate("second-scale", f"{name} {words}", partial(torch.mul, case.expected, factor))
        if value and abs(ratio - value**2) <= FACTOR * value**2 and value**2 != 1:
            yield Candidate(
                "second-scale",
                f"{name} multiplied by where it divides",
                partial(torch.mul, case.expected, value**2),
            )
    if abs(ratio - 1) > FACTOR:
        words = f"every number {ratio:.6g} times what it should be"
        yield Candidate("factor", words, partial(torch.mul, case.expected, ratio))


def _ratio(case: Case, wrong: Tensor) -> float | None:
    """The median of what came out over what is meant, in the wrong places."""
    at = wrong & (case.expected != 0) & case.expected.isfinite() & case.got.isfinite()
    if int(at.sum()) < LEAST:
        return None
    ratio = float((case.got[at].double() / case.expected[at].double()).median())
    return ratio if ratio else None


def biases(case: Case) -> Iterator[Candidate]:
    """A bias, which one-hot inputs show beside the weight, missing from what came out or in it twice."""
    if case.bias is not None:
        column = case.bias.float()[:, None]
        yield Candidate("bias-missing", "no bias", lambda: case.expected - column)
        yield Candidate("bias-twice", "the bias added twice", lambda: case.expected + column)


def unlike_numbers(case: Case, wrong: Tensor) -> tuple[str, str] | None:
    """(fault, words) where nearly all that is wrong is NaN, infinite, or a rectangle of zeros."""
    count = int(wrong.sum())
    got = case.got[wrong]
    if int(got.isnan().sum()) >= ONE_KIND * count:
        return "never-written", "NaN where numbers belong: nothing was written there"
    if int(got.isinf().sum()) >= ONE_KIND * count:
        return "overflown", "infinities where numbers belong"
    zeros = wrong & (case.got == 0)
    rows, columns = (torch.nonzero(zeros.any(axis)).flatten() for axis in (1, 0))
    if int(zeros.sum()) < max(LEAST, ONE_KIND * count) or not rows.numel():
        return None
    tile = case.got[int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]
    if int((tile == 0).sum()) >= ONE_KIND * tile.numel():
        return "left-out", "zeros where numbers belong: a tile was left out"
    return None
