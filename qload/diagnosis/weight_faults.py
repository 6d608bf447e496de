"""Faults of the weight as a whole: misplaced outputs, inputs, parts, ranks or experts, and wrong factors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from qload.diagnosis import reading_faults
from qload.diagnosis.comparison import Candidate, Case, Closeness

MOST_BLOCKS = 64  # ranks, or experts, that are compared with each other
MOST_PARTS = 4
TILES = (8, 16)
NAN = float("nan")


def candidates(case: Case, closeness: Closeness) -> Iterator[Candidate]:
    """The expected weight with its outputs, inputs or blocks elsewhere."""
    yield from _ranks(case, closeness)
    yield from _parts(case)
    if case.matrix is not None:
        for fault, words, order in reading_faults.act_order_permutations(case.matrix):
            yield Candidate(fault, words, partial(case.expected.index_select, 1, order))
    for size in sorted({case.expected.shape[0], case.expected.shape[1]} if _is_square(case) else ()):
        yield Candidate("transposed", f"({size}, {size}) transposed", lambda: case.expected.T)
    for size in TILES:
        if not case.expected.shape[0] % size and not case.expected.shape[1] % size:
            words = f"tiles of {size} x {size} transposed"
            yield Candidate("transposed", words, partial(_tiles_turned, case.expected, size))
    yield from _shifted(case)


def shifted_codes(case: Case) -> Iterator[Candidate]:
    """Codes that lie one word too far, or one byte, input or output, under scales that do not."""
    if (codes := case.matrix) is None:
        return
    word = 32 // codes.bits
    moves = ((1, "K", word), (0, "N", 1), (1, "K", max(1, 8 // codes.bits)), (1, "K", 1), (0, "N", word))
    for axis, letter, step in dict.fromkeys(moves):
        for sign, where in ((-1, "back"), (1, "on")):
            if codes.codes.shape[axis] > 2 * step:
                yield Candidate(
                    "codes-shifted",
                    f"codes {step} {where} along {letter}",
                    partial(_codes_rolled, case, axis, sign * step),
                )


def _codes_rolled(case: Case, axis: int, step: int) -> Tensor:
    assert case.codes is not None
    rolled = replace(case.codes, codes=case.codes.plain().roll(step, axis))
    return _without_edge(case.applied(rolled.dequantize()).clone(), axis, step)


def _is_square(case: Case) -> bool:
    return case.expected.shape[0] == case.expected.shape[1]


def _parts(case: Case) -> Iterator[Candidate]:
    N = case.expected.shape[0]
    fused = case.parts if 1 < len(case.parts) <= MOST_PARTS and sum(case.parts) == N else ()
    if fused:
        yield from _exchanged(case, fused, "the parts")
    else:
        if N % 2 == 0:
            yield from _exchanged(case, (N // 2,) * 2, "the halves")
        if N % 3 == 0:
            yield from _exchanged(case, (N // 3,) * 3, "the thirds")
    count = len(fused) or 2
    if N % count == 0 and len(set(fused)) <= 1 and count < N:
        apart = torch.arange(N).reshape(count, -1)
        for order, words in ((apart.T, "interleaved"), (torch.arange(N).reshape(-1, count).T, "taken apart")):
            index = order.flatten().to(case.expected.device)
            said = f"outputs of {count} parts {words}"
            yield Candidate("parts-interleaved", said, partial(case.expected.index_select, 0, index))


def _exchanged(case: Case, sizes: Sequence[int], what: str) -> Iterator[Candidate]:
    """Every other order of runs of outputs; a pair of equal ones that are exchanged comes first."""
    own = tuple(range(len(sizes)))
    names = _names(len(sizes))
    for order in sorted(
        permutations(own), key=lambda order: sum(a != b for a, b in zip(order, own, strict=True))
    ):
        if order != own:
            words = f"{what} of its outputs in the order {', '.join(str(at + 1) for at in order)}{names}"
            yield Candidate("parts-exchanged", words, partial(_in_order, case.expected, sizes, order))


def _names(count: int) -> str:
    return {2: " (gate and up are exchanged)", 3: " (q, k and v are exchanged)"}.get(count, "")


def _in_order(expected: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    parts = torch.split(expected, list(sizes))
    return torch.cat([parts[at] for at in order])


def _ranks(case: Case, closeness: Closeness) -> Iterator[Candidate]:
    """Another rank's share; or, where all shares lie one after another, which share each rank has."""
    for other, share in enumerate(case.shares):
        if other != case.rank:
            fault = "ranks-exchanged" if other else "rank-0-everywhere"
            yield Candidate(fault, f"rank {other}'s share on rank {case.rank}", share.clone)
    if case.rank is None and 1 < case.world <= MOST_BLOCKS:
        for axis in (0, 1):
            yield from _blocks(case, closeness, axis, case.world, "rank")
    if 1 < case.experts <= MOST_BLOCKS:
        yield from _blocks(case, closeness, 0, case.experts, "expert")


def _blocks(case: Case, closeness: Closeness, axis: int, count: int, what: str) -> Iterator[Candidate]:
    """Each block of `got` taken for the block of `expected` that it is nearest to."""
    if case.expected.shape[axis] % count:
        return
    size = case.expected.shape[axis] // count
    have, should = (torch.split(each, size, axis) for each in (case.got, case.expected))
    found = [_nearest(one, should, closeness, own) for own, one in enumerate(have)]
    moved = [(own, other) for own, other in enumerate(found) if own != other]
    if not moved:
        return
    alone = what == "rank" and all(other == 0 for _, other in moved)
    fault = "rank-0-everywhere" if alone else f"{what}s-exchanged"
    said = ", ".join(f"{what} {own} has {what} {other}'s" for own, other in moved[:3])
    words = "the share of rank 0 on every rank" if alone else f"{said}{', and others' * (len(moved) > 3)}"
    yield Candidate(fault, words, lambda: torch.cat([should[other] for other in found], axis))


def _nearest(one: Tensor, should: Sequence[Tensor], closeness: Closeness, own: int) -> int:
    """The block that agrees with this one in most places; itself where none does better."""
    agreeing = [float(closeness(one, other).double().mean()) for other in should]
    best = max(range(len(should)), key=agreeing.__getitem__)
    return best if agreeing[best] > agreeing[own] else own


def _tiles_turned(expected: Tensor, size: int) -> Tensor:
    N, K = expected.shape
    tiles = expected.reshape(N // size, size, K // size, size)
    return tiles.transpose(1, 3).reshape(N, K)


def _shifted(case: Case) -> Iterator[Candidate]:
    for axis, what in ((0, "outputs"), (1, "inputs")):
        if case.expected.shape[axis] < 4:
            continue
        for step, where in ((-1, "back"), (1, "on")):
            made: Callable[[], Tensor] = partial(_moved, case.expected, axis, step)
            yield Candidate(f"{what}-shifted", f"{what} one {where}", made)
        yield Candidate("outputs-reversed", f"{what} in the reverse order", partial(case.expected.flip, axis))


def _moved(expected: Tensor, axis: int, step: int) -> Tensor:
    return _without_edge(expected.roll(step, axis), axis, step)


def _without_edge(moved: Tensor, axis: int, step: int) -> Tensor:
    """NaN where what comes in from beyond the edge would lie."""
    start = 0 if step > 0 else moved.shape[axis] + step
    moved.narrow(axis, start, abs(step)).fill_(NAN)
    return moved


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
