"""What is wrong with a weight: the known fault that explains it, where, or that none does."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from torch import Tensor

from qload.diagnosis import numbers, places
from qload.diagnosis.case import Candidate, Case, case_of, outputs_of
from qload.diagnosis.closeness import Closeness, closeness_of
from qload.diagnosis.fit import EVIDENCE, Fit, fitted, sample_of
from qload.diagnosis.misreading import Misreading
from qload.diagnosis.misreadings import in_programs
from qload.diagnosis.said import said, said_of_none
from qload.diagnosis.where import Where, where_of
from qload.errors import ArgumentError, check_values, checked
from qload.spec import Weight


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
    kind = numbers.unlike_numbers(case, wrong)
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
    yield from chain(numbers.biases(case), _of_codes(case), places.candidates(case, closeness))
    yield from chain(numbers.factors(case, wrong), places.shifted_codes(case))


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
