"""A quantized weight as programs that get it wrong would read it, beside a reference that it should equal."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from qload.diagnosis.dequantized import meant, with_factors
from qload.diagnosis.reading_faults import in_files
from qload.formats import GPTQWeight
from qload.formats.gptq import FIELDS, WHOLE
from qload.layouts import gptq
from qload.spec import Codes, Weight

WORD = 32  # bits

# Of one run of outputs: ours as it should have been read, and the part of the reference that it has to equal.
Pair = tuple[Tensor, Tensor]
Reading = Callable[[], Pair]


def readings(weight: Weight, reference: Weight) -> dict[str, Reading]:
    """The mistake that a file may hold, in words -> both (n, k) float32 with that mistake taken back.

    `weight` and `reference` are the same outputs of a layer and of what it should be.
    """
    want = meant(reference)
    if weight.format == "unquantized":
        return dict(_shifted_rows(meant(weight), want))
    codes = weight.codes()
    found = {each.words: _whole(weight, each.read, want) for each in in_files(weight)}
    found |= {mistake: _whole(weight, made, want) for mistake, made in wrapped(weight, codes)}
    if reference.format == weight.format:
        other = reference.codes()
        found |= {mistake: _whole(weight, made, want) for mistake, made in _exchanged(codes, other)}
    return {**found, **dict(_shifted_words(weight, codes, want)), **dict(_shifted_rows(meant(weight), want))}


def wrapped(weight: Weight, codes: Codes) -> Iterator[tuple[str, Callable[[], Codes]]]:
    """Yield a GPTQ weight in the other reading of zero points of 0, if that changes any."""
    if not isinstance(weight, GPTQWeight) or codes.zeros is None:
        return
    for ours, other, words in (
        (WHOLE, FIELDS, "zero points minus one in each field by itself"),
        (FIELDS, WHOLE, "zero points minus one in whole words"),
    ):
        if weight.config.zeros == ours:
            zeros = other.read(weight.qzeros, gptq.columns(weight.config.bits)).T
            if _differ(codes.zeros, zeros):
                yield words, lambda: replace(codes, zeros=zeros)  # noqa: B023 - at most one is yielded


def _whole(weight: Weight, made: Callable[[], Codes], want: Tensor) -> Reading:
    return lambda: (with_factors(weight, made().dequantize().reshape(want.shape)), want)


def _exchanged(codes: Codes, other: Codes) -> Iterator[tuple[str, Callable[[], Codes]]]:
    """With one of the reference's own tensors in the place of ours, where these differ."""
    if _differ(codes.scales, other.scales):
        yield "the reference's scales", lambda: replace(codes, scales=other.scales)
    if _differ(codes.zeros, other.zeros):
        yield "the reference's zero points", lambda: replace(codes, zeros=other.zeros)
    if _differ(codes.k_group, other.k_group) and codes.scales.shape == other.scales.shape:
        yield "the reference's groups (g_idx)", lambda: replace(codes, k_group=other.k_group)


def _differ(ours: Tensor | None, theirs: Tensor | None) -> bool:
    return ours is not None and theirs is not None and ours.shape == theirs.shape and not ours.equal(theirs)


def _shifted_words(weight: Weight, codes: Codes, want: Tensor) -> Iterator[tuple[str, Reading]]:
    """Codes that lie one word too far along K, or one output too far, under scales that do not."""
    if want.ndim != 2:
        return
    for axis, letter, step in ((1, "K", WORD // codes.bits), (0, "N", 1)):
        for sign, where in ((-1, "back"), (1, "on")):
            if codes.codes.shape[axis] > step:
                yield f"codes {step} {where} along {letter}", _rolled(weight, codes, want, axis, sign * step)


def _rolled(weight: Weight, codes: Codes, want: Tensor, axis: int, step: int) -> Reading:
    """What would come in from beyond the run is left out of the comparison."""

    def made() -> Pair:
        rolled = replace(codes, codes=codes.plain().roll(step, axis)).dequantize().reshape(want.shape)
        moved = with_factors(weight, rolled)
        size = want.shape[axis] - abs(step)
        start = max(0, step)
        return moved.narrow(axis, start, size), want.narrow(axis, start, size)

    return made


def _shifted_rows(got: Tensor, want: Tensor) -> Iterator[tuple[str, Reading]]:
    """Whole outputs, one too far."""
    if got.ndim == 2 and got.shape[0] > 1:
        yield "outputs one back", lambda: (got[1:], want[:-1])
        yield "outputs one on", lambda: (got[:-1], want[1:])
