"""`diagnose`: name the known fault that explains the errors of a weight, and their location."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf, log

import torch
from torch import Tensor

from qload.diagnosis import weight_faults
from qload.diagnosis.comparison import (
    Candidate,
    Case,
    Closeness,
    Where,
    case_of,
    closeness_of,
    outputs_of,
    where_of,
)
from qload.diagnosis.reading_faults import Misreading, in_programs
from qload.errors import ArgumentError, check_values, checked
from qload.spec import Weight

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


# What a mistake usually comes from.
NOTES = {
    "zero-points-one-higher": "v2 read as v1",
    "zero-points-one-lower": "v1 read as v2",
    "zero-points-ignored": "read as symmetric",
}


def said(words: str, share: float, where: Where, everywhere: Where | None, fault: str = "") -> str:
    """A fault, how much it explains, and where it is if it is not wherever it could be, `everywhere`."""
    note = f" ({NOTES[fault]})" if fault in NOTES else ""
    shown = f"{100 * share:.1f}".removesuffix(".0")
    told = f"{words}{note}: explains {shown} % of {where.wrong} wrong numbers of {where.total}"
    wide = everywhere.bounds() if everywhere is not None else {}
    narrow = [
        _bound(name, bound, where)
        for name, bound in where.bounds().items()
        if not _covers(bound, wide.get(name)) or (everywhere and _sparse(name, where, everywhere))
    ]
    return f"{told}, at {', '.join(narrow)}" if narrow else told


def said_of_none(case: Case, wrong: Tensor, where: Where) -> str:
    """That no known fault explains what is wrong, where that is, and the first of it."""
    n, k = wrong.nonzero()[0].tolist()
    at = ", ".join(_bound(name, bound, where) for name, bound in where.bounds().items())
    return (
        f"a fault of no known class: {where.wrong} of {where.total} numbers are wrong, at {at}; the first at "
        f"(n, k) = ({n}, {k}): {case.got[n, k]:g}, expected {case.expected[n, k]:g}"
    )


def _sparse(name: str, where: Where, everywhere: Where) -> bool:
    """Whether only some of the outputs, or of the inputs, between the bounds have what all of them could."""
    if name == "outputs":
        return where.outputs < everywhere.outputs
    return name == "inputs" and where.inputs < everywhere.inputs


def _covers(bound: tuple[int, int], wide: tuple[int, int] | None) -> bool:
    return wide is not None and bound[0] <= wide[0] and wide[1] <= bound[1]


def _bound(name: str, bound: tuple[int, int], where: Where) -> str:
    first, last = bound[0], bound[1] - 1
    if last == first:
        return f"{name.removesuffix('s')} {first}"
    count = {"outputs": where.outputs, "inputs": where.inputs}.get(name, bound[1] - bound[0])
    some = f"{count} of the " if count < bound[1] - bound[0] else ""
    return f"{some}{name} {first} to {last}"


@dataclass(frozen=True)
class Diagnosis:
    """What came of a comparison.

    Attributes
    ----------
    fault
        The id of its class, of `FAULT_CLASSES`; None where nothing is wrong, or no known fault explains it.
    sentence
        All of it in plain words.
    share
        How much of what is wrong the fault explains, 0 to 1.
    wrong, total
        How many numbers are wrong, and of how many.
    n, k, group, rank, expert
        Where the wrong numbers lie: the first of each and one past the last. None where it is not known.
    also
        The ids of other classes that would have given the same numbers.
    """

    fault: str | None
    sentence: str
    share: float = 0.0
    wrong: int = 0
    total: int = 0
    n: tuple[int, int] | None = None
    k: tuple[int, int] | None = None
    group: tuple[int, int] | None = None
    rank: tuple[int, int] | None = None
    expert: tuple[int, int] | None = None
    also: tuple[str, ...] = ()


@checked
def diagnose(
    expected: Tensor,
    got: Tensor,
    layer: Weight | Sequence[Weight] | None = None,
    *,
    rank: int | None = None,
    world: int | None = None,
    bias: Tensor | None = None,
) -> Diagnosis:
    """Name the fault that turns one weight into the other, if it is a known one.

        found = diagnose(weight.dequantize(), read_back, weight)
        assert found.wrong == 0, found.sentence

    Numbers that differ by no more than how the type of `got` rounds are equal. A fault is named that
    explains nine tenths of what is wrong, beyond what chance explains; else `fault` is None.

    Parameters
    ----------
    expected
        What is meant, (N, K) of a float dtype, or (E, N, K) of experts.
    got
        What came out, in the same shape.
    layer
        What `expected` is made of: the weight, or one for each expert. Without it only faults of places and
        of plain numbers are known.
    rank, world
        Of a share: whose it is, of how many; `layer` may then be the whole one, which is cut evenly. `world`
        alone: the shares of all ranks lie one after another.
    bias
        (N,), where `expected` is meant with it added to each input.

    Raises
    ------
    ArgumentError
        Where the shapes do not go together.
    """
    if expected.shape != got.shape or expected.ndim not in (2, 3):
        raise ArgumentError(
            "got",
            f"the shape of what is expected, {tuple(expected.shape)} = (N, K) or (E, N, K)",
            str(tuple(got.shape)),
        )
    check_values("expected", expected)
    check_values("got", got)
    closeness = closeness_of(expected, got)
    if expected.ndim == 3:
        return _of_experts(expected.float(), got.float(), layer, closeness)
    weight = layer if layer is None or isinstance(layer, Weight) else layer[0]
    case = case_of(expected.float(), got.float(), weight, rank, world)
    return of_case(replace(case, bias=bias), closeness)


def explained(
    expected: Tensor, got: Tensor, layer: Weight | None, first: int = 0, bias: Tensor | None = None
) -> str | None:
    """The sentence of a known fault that explains outputs of a `layer` (n, K), from `first` on; else None.

    `bias` (n,) was added to both at every input.
    """
    closeness = closeness_of(expected, got)
    case = case_of(expected.float(), got.float(), layer, None, None)
    if layer is not None and tuple(layer.shape) != tuple(expected.shape):
        case = outputs_of(case, first)
    found = of_case(replace(case, first=first, bias=bias), closeness)
    return None if found.fault is None else found.sentence


def of_case(case: Case, closeness: Closeness) -> Diagnosis:
    """The same of a case that is made up already."""
    wrong = ~closeness(case.got, case.expected) & ~(case.got.isnan() & case.expected.isnan())
    total = wrong.numel()
    if not bool(wrong.any()):
        return Diagnosis(None, f"nothing is wrong: {total} numbers agree", total=total)
    where = where_of(case, wrong)
    kind = weight_faults.unlike_numbers(case, wrong)
    if kind is not None:
        return _named(kind[0], said(kind[1], 1.0, where, None), 1.0, where)
    near, sample = closeness.of_fits(case.expected, case.got), sample_of(wrong)
    fits = [
        fit
        for candidate in _candidates(case, wrong, near)
        if (fit := fitted(case, candidate, wrong, near, sample)) and fit.evidence >= EVIDENCE
    ]
    if not fits:
        return _named(None, said_of_none(case, wrong, where), 0.0, where)
    best = max(fits, key=lambda fit: fit.share)  # of several the first, which is the likeliest
    also = tuple(dict.fromkeys(fit.candidate.fault for fit in fits if fit.share == best.share))
    return replace(
        _told(best, case, where), also=tuple(fault for fault in also if fault != best.candidate.fault)
    )


def _candidates(case: Case, wrong: Tensor, closeness: Closeness) -> Iterator[Candidate]:
    yield from chain(weight_faults.biases(case), _of_codes(case), weight_faults.candidates(case, closeness))
    yield from chain(weight_faults.factors(case, wrong), weight_faults.shifted_codes(case))


def _of_codes(case: Case) -> Iterator[Candidate]:
    if case.codes is None:
        return
    for each in in_programs(case.codes, case.stored):
        yield Candidate(each.fault, each.words, partial(_read, case, each))


def _read(case: Case, misreading: Misreading) -> Tensor:
    return case.applied(misreading.made().dequantize())


def _told(fit: Fit, case: Case, where: Where) -> Diagnosis:
    everywhere = where_of(case, fit.extent)
    sentence = said(fit.candidate.words, fit.share, where, everywhere, fit.candidate.fault)
    return _named(fit.candidate.fault, sentence, fit.share, where)


def _named(fault: str | None, sentence: str, share: float, where: Where) -> Diagnosis:
    return Diagnosis(
        fault,
        sentence,
        share,
        where.wrong,
        where.total,
        n=where.n,
        k=where.k,
        group=where.group,
        rank=where.rank,
        expert=where.expert,
    )


def _of_experts(
    expected: Tensor, got: Tensor, layer: Weight | Sequence[Weight] | None, closeness: Closeness
) -> Diagnosis:
    """Experts that changed places, or one fault of all experts that have one."""
    E, N, K = expected.shape
    flat = Case(expected.reshape(E * N, K), got.reshape(E * N, K), experts=E)
    whole = of_case(flat, closeness)
    if whole.fault is not None or not whole.wrong:
        return whole
    wrong = ~closeness(got, expected)
    erring = [place for place in range(E) if bool(wrong[place].any())]
    each = [of_case(_expert(expected, got, layer, place), closeness) for place in erring]
    faults = {found.fault for found in each}
    where = where_of(flat, wrong.reshape(E * N, K))
    if len(faults) > 1 or each[0].fault is None:
        return whole
    first = each[0]
    words = first.sentence.partition(": explains")[0]
    share = sum(found.share * found.wrong for found in each) / sum(found.wrong for found in each)
    groups = [found.group for found in each if found.group]
    where = replace(where, group=(min(g[0] for g in groups), max(g[1] for g in groups)) if groups else None)
    return replace(_named(first.fault, said(words, share, where, None), share, where), also=first.also)


def _expert(expected: Tensor, got: Tensor, layer: Weight | Sequence[Weight] | None, place: int) -> Case:
    if layer is None:
        return Case(expected[place], got[place])
    if not isinstance(layer, Weight):
        return case_of(expected[place], got[place], layer[place], None, None)
    E, N, _ = expected.shape
    case = case_of(expected.reshape(E * N, -1), got.reshape(E * N, -1), layer, None, None)
    return outputs_of(replace(case, expected=expected[place], got=got[place]), place * N)


# What of each, in plain words: "a kernel, a packer or a file has ...".
FAULT_CLASSES: dict[str, str] = {
    "zero-points-one-lower": "every zero point one too low: stored minus one (v1), read as it is (v2)",
    "zero-points-one-higher": "every zero point one too high: stored as it is (v2), read as minus one (v1)",
    "zero-points-wrapped": "zero points that pass the end of their bits wrapped, or not wrapped",
    "zero-points-missing": "no zero point subtracted",
    "zero-points-twice": "every zero point subtracted twice",
    "zero-points-added": "every zero point added where it is subtracted",
    "zero-points-ignored": "the middle of the codes in place of every zero point",
    "zero-points-of-another-group": "every zero point that of a neighbouring group",
    "zero-points-of-another-output": "every zero point that of a neighbouring output",
    "zero-point-order": "zero points in another order within their words",
    "scales-of-another-group": "every scale that of a neighbouring group",
    "scales-of-another-output": "every scale that of a neighbouring output",
    "scales-of-the-first": "one scale, the first, for all groups or for all outputs",
    "scales-missing": "no scale at all: codes minus zero points",
    "scales-twice": "every scale applied twice",
    "scales-inverted": "division where the scale multiplies, or the reverse",
    "scales-transposed": "scales of (n, k) blocks read as those of (k, n)",
    "scale-order": "scales in the order of another kernel",
    "scale-type": "the bits of float16 scales read as bfloat16, or the reverse",
    "second-scale": "the scale of the whole tensor missing, applied twice, or inverted",
    "factor": "every number times one factor",
    "group-size": "groups half or twice as large as they are",
    "groups-reversed": "the groups in the reverse order",
    "code-order": "codes in another order within their words",
    "byte-order": "words with their bytes reversed, as a machine of the other byte order writes them",
    "code-sign": "codes of two's complement read as offset ones, or the sign lost",
    "float-type": "codes looked up in the table of another float type",
    "codes-shifted": "codes one word, one input or one output further than their scales",
    "act-order-ignored": "groups or inputs taken in order where act order has permuted them",
    "act-order-inverse": "the permutation of act order applied in the wrong direction",
    "parts-exchanged": "the parts of a fused layer in another order: gate and up, or q, k and v",
    "parts-interleaved": "outputs of two parts taking turns where they follow each other, or the reverse",
    "outputs-shifted": "whole outputs one further than they are",
    "inputs-shifted": "whole inputs one further than they are",
    "outputs-reversed": "outputs, or inputs, in the reverse order",
    "transposed": "a square matrix, or its square tiles, transposed",
    "rank-0-everywhere": "the share of rank 0 on every rank",
    "ranks-exchanged": "shares on other ranks than their own",
    "experts-exchanged": "experts in other places than their own",
    "input-factors": "what inputs are multiplied by before the weight missing, applied twice, or inverted",
    "bias-missing": "no bias where there is one",
    "bias-twice": "a bias added twice",
    "left-out": "zeros where numbers belong, in one rectangle: a tile was left out",
    "never-written": "NaN where numbers belong: memory that nothing was written to",
    "overflown": "infinities where numbers belong",
}
