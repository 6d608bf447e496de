"""`diagnose`: name the known fault behind the errors of a weight, and their location."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, log

import torch
from torch import Tensor

from qload.diagnosis import weight_faults
from qload.diagnosis.comparison import (
    ErrorLocation,
    Hypothesis,
    Range,
    Tolerance,
    WeightComparison,
    compare,
    locate_errors,
    slice_outputs,
    tolerance_for,
)
from qload.diagnosis.reading_faults import ReadingFault, faults_in_programs
from qload.errors import ArgumentError, check_values, checked
from qload.spec import Weight

# Fault classes by id, as in "a kernel, a packer or a file has ...".
FAULT_CLASSES: dict[str, str] = {
    "zero-points-one-lower": "every zero point one too low: stored minus one (v1), read unchanged (v2)",
    "zero-points-one-higher": "every zero point one too high: stored unchanged (v2), read as minus one (v1)",
    "zero-points-wrapped": "zero points out of the range of their bits wrapped, or not wrapped",
    "zero-points-missing": "no zero point subtracted",
    "zero-points-twice": "every zero point subtracted twice",
    "zero-points-added": "every zero point added instead of subtracted",
    "zero-points-ignored": "the middle of the codes in place of every zero point",
    "zero-points-of-another-group": "every zero point taken from a neighbouring group",
    "zero-points-of-another-output": "every zero point taken from a neighbouring output",
    "zero-point-order": "zero points in another order within their words",
    "scales-of-another-group": "every scale taken from a neighbouring group",
    "scales-of-another-output": "every scale taken from a neighbouring output",
    "scales-of-the-first": "the first scale for all groups or for all outputs",
    "scales-missing": "no scale at all: codes minus zero points",
    "scales-twice": "every scale applied twice",
    "scales-inverted": "division instead of multiplication by the scale, or the reverse",
    "scales-transposed": "scales of (n, k) blocks read as scales of (k, n) blocks",
    "scale-order": "scales in the order of another kernel",
    "scale-type": "the bits of float16 scales read as bfloat16, or the reverse",
    "second-scale": "the scale of the whole tensor missing, applied twice, or inverted",
    "factor": "every number times one factor",
    "group-size": "groups half or twice as large as they are",
    "groups-reversed": "the groups in the reverse order",
    "code-order": "codes in another order within their words",
    "byte-order": "words with their bytes reversed, as on a machine of the other byte order",
    "code-sign": "codes of two's complement read as offset codes, or the sign lost",
    "float-type": "codes looked up in the table of another float type",
    "codes-shifted": "codes shifted by one word, input or output against their scales",
    "act-order-ignored": "groups or inputs in order although act order permutes them",
    "act-order-inverse": "the permutation of act order applied in the wrong direction",
    "parts-exchanged": "the parts of a fused layer in another order: gate and up, or q, k and v",
    "parts-interleaved": "outputs of two parts interleaved instead of consecutive, or the reverse",
    "outputs-shifted": "outputs shifted by one",
    "inputs-shifted": "inputs shifted by one",
    "outputs-reversed": "outputs, or inputs, in the reverse order",
    "transposed": "a square matrix, or its square tiles, transposed",
    "rank-0-everywhere": "the share of rank 0 on every rank",
    "ranks-exchanged": "shares on other ranks than their own",
    "experts-exchanged": "experts in other places than their own",
    "input-factors": "input factors missing, applied twice, or inverted",
    "bias-missing": "no bias although the layer has one",
    "bias-twice": "a bias added twice",
    "left-out": "zeros in place of numbers, in one rectangle: a tile was left out",
    "never-written": "NaN in place of numbers: memory that nothing was written to",
    "overflown": "infinities in place of numbers",
    "inputs-int8": "inputs rounded to 8-bit integers, for a kernel of plain inputs",
    "inputs-fp8": "inputs rounded to 8-bit floats, for a kernel of plain inputs",
    "tokens": "results of some tokens alone: rows of x beyond a tile",
    "rank-missing": "zeros in the place of a whole rank's share",
}
# Usual causes, by fault.
CAUSES = {
    "zero-points-one-higher": "v2 read as v1",
    "zero-points-one-lower": "v1 read as v2",
    "zero-points-ignored": "read as symmetric",
}
MIN_EVIDENCE_NATS = 20.0  # chance explains as much once in 5e8 trials; there are some hundred hypotheses
MIN_ERRORS = 6  # that a fault has to explain
MIN_SHARE = 0.9  # of the errors that a named fault explains
SAMPLE_SIZE = 2048  # errors on which a hypothesis is tried before it is tried on all
MIN_SAMPLE_SHARE = MIN_SHARE / 2  # of a sample; a fault with MIN_SHARE of all never has less


@dataclass(frozen=True)
class Diagnosis:
    """Result of a diagnosis.

    Attributes
    ----------
    fault
        Id of the fault class, a key of `FAULT_CLASSES`; None if nothing is wrong, or no known fault explains
        it.
    sentence
        The result in plain words.
    share
        Share of the errors that the fault explains, 0 to 1.
    wrong, total
        Number of wrong values, and of all values.
    n, k, group, rank, expert
        Ranges with all wrong values: the first index, and one past the last. None if a range is not known.
    also
        Ids of other classes with the same predictions.
    """

    fault: str | None
    sentence: str
    share: float = 0.0
    wrong: int = 0
    total: int = 0
    n: Range | None = None
    k: Range | None = None
    group: Range | None = None
    rank: Range | None = None
    expert: Range | None = None
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fit:
    """Agreement of a hypothesis with the read-back weight.

    Attributes
    ----------
    hypothesis
        The fault.
    share
        Share of the errors that it explains; errors that it would add are subtracted.
    evidence
        Evidence against an agreement by chance, in nats.
    extent
        Places that the fault changes, bool (N, K).
    """

    hypothesis: Hypothesis
    share: float
    evidence: float
    extent: Tensor


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
    """Name the known fault that turns one weight into the other, if there is one.

        found = diagnose(weight.dequantize(), read_back, weight)
        assert found.wrong == 0, found.sentence

    Values are equal if they differ by no more than the rounding of the dtype of `got`. A fault is named if it
    explains nine tenths of the errors, and chance does not; else `fault` is None.

    Parameters
    ----------
    expected
        The correct weight, (N, K) of a float dtype, or (E, N, K) of experts.
    got
        The read-back weight, in the same shape.
    layer
        The typed weight of `expected`, or one for each expert. Without it only misplaced and scaled values
        are recognized.
    rank, world
        For a share: its rank, and the number of ranks; `layer` may then be whole, and is cut evenly. `world`
        alone: the shares of all ranks lie one after another.
    bias
        (N,), if `expected` includes it for every input.

    Raises
    ------
    ArgumentError
        If the shapes differ, or are not (N, K) or (E, N, K).
    """
    if expected.shape != got.shape or expected.ndim not in (2, 3):
        shape = f"the shape of `expected`, {tuple(expected.shape)} = (N, K) or (E, N, K)"
        raise ArgumentError("got", shape, str(tuple(got.shape)))
    check_values("expected", expected)
    check_values("got", got)
    tolerance = tolerance_for(expected, got)
    if expected.ndim == 3:
        return _diagnose_experts(expected.float(), got.float(), layer, tolerance)
    weight = layer if layer is None or isinstance(layer, Weight) else layer[0]
    comparison = compare(expected, got, weight, rank, world)
    return diagnose_comparison(replace(comparison, bias=bias), tolerance)


def explain_errors(
    expected: Tensor, got: Tensor, layer: Weight | None, first: int = 0, bias: Tensor | None = None
) -> str | None:
    """Return the sentence of the known fault behind the errors of outputs (n, K) of a `layer`, or None.

    `first` is the number of the first output; both weights include `bias` (n,) for every input.
    """
    comparison = compare(expected, got, layer)
    if layer is not None and tuple(layer.shape) != tuple(expected.shape):
        comparison = slice_outputs(comparison, first)
    comparison = replace(comparison, first_output=first, bias=bias)
    diagnosis = diagnose_comparison(comparison, tolerance_for(expected, got))
    return None if diagnosis.fault is None else diagnosis.sentence


def diagnose_comparison(comparison: WeightComparison, tolerance: Tolerance) -> Diagnosis:
    """Try all known faults on a comparison, and return the best."""
    expected, got = comparison.expected, comparison.got
    wrong = ~tolerance.agree(got, expected) & ~(got.isnan() & expected.isnan())
    total = wrong.numel()
    if not bool(wrong.any()):
        return Diagnosis(None, f"nothing is wrong: {total} numbers agree", total=total)
    location = locate_errors(comparison, wrong)
    non_numbers = weight_faults.find_non_numbers(comparison, wrong)
    if non_numbers is not None:
        fault, text = non_numbers
        return _diagnosis(fault, _sentence(text, 1.0, location, None), 1.0, location)
    predicting, sample = tolerance.for_predictions(expected, got), sample_errors(wrong)
    fits = [
        fit
        for hypothesis in _hypotheses(comparison, wrong, predicting)
        if (fit := fit_hypothesis(comparison, hypothesis, wrong, predicting, sample))
        and fit.evidence >= MIN_EVIDENCE_NATS
    ]
    if not fits:
        return _diagnosis(None, _unknown_fault_sentence(comparison, wrong, location), 0.0, location)
    best = max(fits, key=lambda fit: fit.share)  # of several the first, which is the likeliest
    fault, extent = best.hypothesis.fault, locate_errors(comparison, best.extent)
    sentence = _sentence(best.hypothesis.text, best.share, location, extent, fault)
    also = dict.fromkeys(fit.hypothesis.fault for fit in fits if fit.share == best.share)
    also.pop(fault)
    return replace(_diagnosis(fault, sentence, best.share, location), also=tuple(also))


def _hypotheses(comparison: WeightComparison, wrong: Tensor, tolerance: Tolerance) -> Iterator[Hypothesis]:
    """Yield all hypotheses, the likeliest first."""
    yield from weight_faults.wrong_biases(comparison)
    if comparison.codes is not None:
        for reading in faults_in_programs(comparison.codes, comparison.word_order):
            yield Hypothesis(reading.fault, reading.words, partial(_predict, comparison, reading))
    yield from weight_faults.misplaced_weights(comparison, tolerance)
    yield from weight_faults.wrong_factors(comparison, wrong)
    yield from weight_faults.shifted_codes(comparison)


def _predict(comparison: WeightComparison, fault: ReadingFault) -> Tensor:
    return comparison.from_codes(fault.read())


def _diagnosis(fault: str | None, sentence: str, share: float, at: ErrorLocation) -> Diagnosis:
    places = at.n, at.k, at.group, at.rank, at.expert
    return Diagnosis(fault, sentence, share, at.wrong, at.total, *places)


def _diagnose_experts(
    expected: Tensor, got: Tensor, layer: Weight | Sequence[Weight] | None, tolerance: Tolerance
) -> Diagnosis:
    """Recognize exchanged experts, and one fault common to all faulty experts."""
    E, N, K = expected.shape
    flat = WeightComparison(expected.reshape(E * N, K), got.reshape(E * N, K), experts=E)
    overall = diagnose_comparison(flat, tolerance)
    if overall.fault is not None or not overall.wrong:
        return overall
    wrong = ~tolerance.agree(got, expected)
    faulty = [expert for expert in range(E) if bool(wrong[expert].any())]
    diagnoses = [
        diagnose_comparison(_compare_expert(expected, got, layer, expert), tolerance) for expert in faulty
    ]
    first = diagnoses[0]
    if len({d.fault for d in diagnoses}) > 1 or first.fault is None:
        return overall
    text = first.sentence.partition(": explains")[0]
    share = sum(d.share * d.wrong for d in diagnoses) / sum(d.wrong for d in diagnoses)
    groups = [d.group for d in diagnoses if d.group]
    group = (min(start for start, _ in groups), max(stop for _, stop in groups)) if groups else None
    location = replace(locate_errors(flat, wrong.reshape(E * N, K)), group=group)
    sentence = _sentence(text, share, location, None)
    return replace(_diagnosis(first.fault, sentence, share, location), also=first.also)


def _compare_expert(
    expected: Tensor, got: Tensor, layer: Weight | Sequence[Weight] | None, expert: int
) -> WeightComparison:
    if layer is None or not isinstance(layer, Weight):
        return compare(expected[expert], got[expert], None if layer is None else layer[expert])
    E, N, _ = expected.shape
    comparison = compare(expected.reshape(E * N, -1), got.reshape(E * N, -1), layer)
    return slice_outputs(replace(comparison, expected=expected[expert], got=got[expert]), expert * N)


def sample_errors(wrong: Tensor) -> tuple[Tensor, Tensor]:
    """Draw at most `SAMPLE_SIZE` wrong places of bool (N, K): rows and columns, int64."""
    rows, columns = wrong.nonzero().unbind(1)
    if rows.numel() > SAMPLE_SIZE:
        drawn = torch.randint(rows.numel(), (SAMPLE_SIZE,), generator=torch.Generator().manual_seed(0))
        rows, columns = (indices[drawn.to(wrong.device)] for indices in (rows, columns))
    return rows, columns


def fit_hypothesis(
    comparison: WeightComparison,
    hypothesis: Hypothesis,
    wrong: Tensor,
    tolerance: Tolerance,
    sample: tuple[Tensor, Tensor],
) -> Fit | None:
    """Fit a fault to the outputs and inputs with errors; None if it explains less than `MIN_SHARE` of them.

    `wrong` are the errors, bool (N, K), and `sample` some of their places.
    """
    expected, got = comparison.expected, comparison.got
    predicted = hypothesis.predict().float()
    sampled = predicted[sample]
    agreeing = tolerance.agree(sampled, got[sample]) | sampled.isnan()  # NaN is no prediction, counted below
    if float(agreeing.double().mean()) < MIN_SAMPLE_SHARE:
        return None
    known = ~predicted.isnan() | expected.isnan()
    known_wrong = wrong & known
    total = int(known_wrong.sum())
    if total < MIN_ERRORS or 2 * total < int(wrong.sum()):
        return None
    # A prediction fits an error only if it is nearer to the weight than no fault, or if any of them is NaN.
    nearer = ~((predicted - got).abs() >= (expected - got).abs()) | (predicted == got)
    fits = tolerance.agree(predicted, got) & (nearer | ~wrong)
    inside = wrong.any(1)[:, None] & wrong.any(0)[None]
    share = 1 - int((inside & known & ~fits).sum()) / total
    if share < MIN_SHARE:
        return None
    explained_errors = int((known_wrong & fits).sum())
    chance = _chance(predicted[known_wrong], got[known_wrong], tolerance)
    evidence = explained_errors * -log(max(chance, 1e-9)) if explained_errors >= MIN_ERRORS else -inf
    return Fit(hypothesis, share, evidence, known & ~tolerance.agree(predicted, expected))


def _chance(predicted: Tensor, got: Tensor, tolerance: Tolerance) -> float:
    """Return the share of agreeing values after a shuffle, with one more success and trial."""
    order = torch.randperm(got.numel(), generator=torch.Generator().manual_seed(0)).to(got.device)
    return (int(tolerance.agree(predicted, got[order]).sum()) + 1) / (got.numel() + 1)


def _sentence(
    text: str, share: float, at: ErrorLocation, extent: ErrorLocation | None, fault: str = ""
) -> str:
    """Return fault, share and location; ranges that cover the whole `extent` of the fault are left out."""
    cause = f" ({CAUSES[fault]})" if fault in CAUSES else ""
    percent = f"{100 * share:.1f}".removesuffix(".0")
    sentence = f"{text}{cause}: explains {percent} % of {at.wrong} wrong numbers of {at.total}"
    extents = extent.ranges() if extent is not None else {}
    narrow = [
        _range_text(unit, bounds, at)
        for unit, bounds in at.ranges().items()
        if not _covers(bounds, extents.get(unit)) or (extent and _is_sparse(unit, at, extent))
    ]
    return f"{sentence}, at {', '.join(narrow)}" if narrow else sentence


def _unknown_fault_sentence(comparison: WeightComparison, wrong: Tensor, at: ErrorLocation) -> str:
    n, k = wrong.nonzero()[0].tolist()
    ranges = ", ".join(_range_text(unit, bounds, at) for unit, bounds in at.ranges().items())
    return (
        f"a fault of no known class: {at.wrong} of {at.total} numbers are wrong, at {ranges}; the first at "
        f"(n, k) = ({n}, {k}): {comparison.got[n, k]:g}, expected {comparison.expected[n, k]:g}"
    )


def _is_sparse(unit: str, at: ErrorLocation, extent: ErrorLocation) -> bool:
    """Return whether fewer outputs, or inputs, have errors than the fault would change."""
    if unit == "outputs":
        return at.outputs < extent.outputs
    return unit == "inputs" and at.inputs < extent.inputs


def _covers(bounds: Range, extent: Range | None) -> bool:
    return extent is not None and bounds[0] <= extent[0] and extent[1] <= bounds[1]


def _range_text(unit: str, bounds: Range, at: ErrorLocation) -> str:
    first, last = bounds[0], bounds[1] - 1
    if last == first:
        return f"{unit.removesuffix('s')} {first}"
    count = {"outputs": at.outputs, "inputs": at.inputs}.get(unit, bounds[1] - bounds[0])
    some = f"{count} of the " if count < bounds[1] - bounds[0] else ""
    return f"{some}{unit} {first} to {last}"
