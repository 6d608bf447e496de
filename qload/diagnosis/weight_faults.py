"""Faults of the weight as a whole: misplaced outputs, inputs, parts, ranks or experts, and wrong factors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from qload.diagnosis.comparison import Hypothesis, Range, Tolerance, WeightComparison
from qload.diagnosis.reading_faults import WORD_BITS, act_order_permutations

MAX_BLOCKS = 64  # ranks or experts that are compared with each other
MAX_PARTS = 4
TILE_SIZES = (8, 16)
FACTOR_TOLERANCE = 2.0**-8  # relative distance of a measured factor from a known one
MIN_KIND_SHARE = 0.9  # of wrong values that are NaN, infinite or zero
MIN_ERRORS = 4


def misplaced_weights(comparison: WeightComparison, tolerance: Tolerance) -> Iterator[Hypothesis]:
    """Yield the expected weight with its outputs, inputs or blocks in other places."""
    expected = comparison.expected
    yield from _rank_faults(comparison, tolerance)
    yield from _part_faults(comparison)
    if comparison.code_matrix is not None:
        for fault, text, order in act_order_permutations(comparison.code_matrix):
            yield Hypothesis(fault, text, partial(expected.index_select, 1, order))
    N, K = expected.shape
    if N == K:
        yield Hypothesis("transposed", f"({N}, {N}) transposed", lambda: expected.T)
    elif N > 1 and K > 1:
        text = f"({N}, {K}) read as ({K}, {N}), transposed"
        yield Hypothesis("transposed", text, lambda: expected.T.reshape(N, K))
        yield Hypothesis("transposed", text, lambda: expected.reshape(K, N).T)
    for size in TILE_SIZES:
        if not N % size and not K % size:
            text = f"tiles of {size} x {size} transposed"
            yield Hypothesis("transposed", text, partial(_transpose_tiles, expected, size))
    for axis, unit in ((0, "outputs"), (1, "inputs")):
        if expected.shape[axis] >= 4:
            for step, where in ((-1, "back"), (1, "on")):
                predict = partial(_shift, expected, axis, step)
                yield Hypothesis(f"{unit}-shifted", f"{unit} one {where}", predict)
            text = f"{unit} in the reverse order"
            yield Hypothesis("outputs-reversed", text, partial(expected.flip, axis))


def shifted_codes(comparison: WeightComparison) -> Iterator[Hypothesis]:
    """Yield codes shifted by a word, a byte, an input or an output against their scales."""
    if (codes := comparison.code_matrix) is None:
        return
    word = WORD_BITS // codes.bits
    moves = ((1, "K", word), (0, "N", 1), (1, "K", max(1, 8 // codes.bits)), (1, "K", 1), (0, "N", word))
    for axis, letter, step in dict.fromkeys(moves):
        for sign, where in ((-1, "back"), (1, "on")):
            if codes.codes.shape[axis] > 2 * step:
                predict = partial(_shift_codes, comparison, axis, sign * step)
                yield Hypothesis("codes-shifted", f"codes {step} {where} along {letter}", predict)


def _shift_codes(comparison: WeightComparison, axis: int, step: int) -> Tensor:
    codes = comparison.codes
    assert codes is not None
    rolled = comparison.from_codes(replace(codes, codes=codes.plain().roll(step, axis)))
    return _blank_edge(rolled.clone(), axis, step)


def _part_faults(comparison: WeightComparison) -> Iterator[Hypothesis]:
    """Yield exchanged and interleaved parts of a fused layer; of one part, of its halves and thirds."""
    expected, N = comparison.expected, comparison.expected.shape[0]
    parts = comparison.parts
    fused = parts if 1 < len(parts) <= MAX_PARTS and sum(parts) == N else ()
    if fused:
        yield from _exchanged_parts(expected, fused, "the parts")
    else:
        if N % 2 == 0:
            yield from _exchanged_parts(expected, (N // 2,) * 2, "the halves")
        if N % 3 == 0:
            yield from _exchanged_parts(expected, (N // 3,) * 3, "the thirds")
    count = len(fused) or 2
    if N % count == 0 and len(set(fused)) <= 1 and count < N:
        outputs = torch.arange(N)
        orders = outputs.reshape(count, -1).T, outputs.reshape(-1, count).T
        for order, change in zip(orders, ("interleaved", "taken apart"), strict=True):
            index = order.flatten().to(expected.device)
            text = f"outputs of {count} parts {change}"
            yield Hypothesis("parts-interleaved", text, partial(expected.index_select, 0, index))


def _exchanged_parts(expected: Tensor, sizes: Sequence[int], parts: str) -> Iterator[Hypothesis]:
    """Yield all other orders of the parts, the exchange of a pair first."""
    count = len(sizes)
    in_order = tuple(range(count))
    names = {2: " (gate and up are exchanged)", 3: " (q, k and v are exchanged)"}.get(count, "")
    for order in sorted(
        permutations(in_order), key=lambda order: sum(a != b for a, b in zip(order, in_order, strict=True))
    ):
        if order != in_order:
            text = f"{parts} of its outputs in the order {', '.join(str(part + 1) for part in order)}{names}"
            yield Hypothesis("parts-exchanged", text, partial(_reorder_parts, expected, sizes, order))


def _reorder_parts(expected: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    parts = torch.split(expected, list(sizes))
    return torch.cat([parts[part] for part in order])


def _rank_faults(comparison: WeightComparison, tolerance: Tolerance) -> Iterator[Hypothesis]:
    """Yield the shares of other ranks; if all shares lie one after another, also exchanged ones."""
    for other, share in enumerate(comparison.shares):
        if other != comparison.rank:
            fault = "ranks-exchanged" if other else "rank-0-everywhere"
            yield Hypothesis(fault, f"rank {other}'s share on rank {comparison.rank}", share.clone)
    if comparison.rank is None and 1 < comparison.world <= MAX_BLOCKS:
        for axis in (0, 1):
            yield from _exchanged_blocks(comparison, tolerance, axis, comparison.world, "rank")
    if 1 < comparison.experts <= MAX_BLOCKS:
        yield from _exchanged_blocks(comparison, tolerance, 0, comparison.experts, "expert")


def _exchanged_blocks(
    comparison: WeightComparison, tolerance: Tolerance, axis: int, count: int, unit: str
) -> Iterator[Hypothesis]:
    """Yield the assignment of each block of `got` to the most similar block of `expected`."""
    if comparison.expected.shape[axis] % count:
        return
    size = comparison.expected.shape[axis] // count
    got, expected = (torch.split(weight, size, axis) for weight in (comparison.got, comparison.expected))
    sources = [_most_similar(block, expected, tolerance, place) for place, block in enumerate(got)]
    moved = [(place, origin) for place, origin in enumerate(sources) if place != origin]
    if not moved:
        return
    if unit == "rank" and all(origin == 0 for _, origin in moved):
        fault, text = "rank-0-everywhere", "the share of rank 0 on every rank"
    else:
        fault = f"{unit}s-exchanged"
        text = ", ".join(f"{unit} {place} has {unit} {origin}'s" for place, origin in moved[:3])
        text += ", and others" * (len(moved) > 3)
    yield Hypothesis(fault, text, lambda: torch.cat([expected[origin] for origin in sources], axis))


def _most_similar(block: Tensor, expected: Sequence[Tensor], tolerance: Tolerance, current: int) -> int:
    """Return the expected block that agrees in most places; `current` unless another one is better."""
    agreeing = [float(tolerance.agree(block, other).double().mean()) for other in expected]
    best = max(range(len(expected)), key=agreeing.__getitem__)
    return best if agreeing[best] > agreeing[current] else current


def _transpose_tiles(expected: Tensor, size: int) -> Tensor:
    N, K = expected.shape
    tiles = expected.reshape(N // size, size, K // size, size)
    return tiles.transpose(1, 3).reshape(N, K)


def _shift(expected: Tensor, axis: int, step: int) -> Tensor:
    return _blank_edge(expected.roll(step, axis), axis, step)


def _blank_edge(rolled: Tensor, axis: int, step: int) -> Tensor:
    """Write NaN to the entries that a roll brought in from beyond the edge."""
    start = 0 if step > 0 else rolled.shape[axis] + step
    rolled.narrow(axis, start, abs(step)).fill_(torch.nan)
    return rolled


def wrong_factors(comparison: WeightComparison, wrong: Tensor) -> Iterator[Hypothesis]:
    """Yield wrong input factors, wrong scales of the whole tensor, and one factor of all values."""
    expected = comparison.expected
    if (factors := comparison.input_factors) is not None:
        unscaled = expected / factors
        yield Hypothesis("input-factors", "inputs not multiplied by their factors", lambda: unscaled)
        twice = expected * factors
        yield Hypothesis("input-factors", "inputs multiplied by their factors twice", lambda: twice)
        yield Hypothesis("input-factors", "inputs divided by their factors", lambda: unscaled / factors)
    ratio = _median_ratio(comparison, wrong)
    if ratio is None:
        return
    for name, value in comparison.scalars:
        changes = (
            (1 / value if value else 0.0, "missing"),
            (value, "applied twice"),
            (value**-2 if value else 0.0, "inverted"),
            (value**2, "multiplied by where it divides"),
        )
        for factor, change in changes:
            if factor not in (0, 1) and abs(ratio - factor) <= FACTOR_TOLERANCE * abs(factor):
                yield Hypothesis("second-scale", f"{name} {change}", partial(torch.mul, expected, factor))
    if abs(ratio - 1) > FACTOR_TOLERANCE:
        text = f"every number {ratio:.6g} times what it should be"
        yield Hypothesis("factor", text, partial(torch.mul, expected, ratio))


def _median_ratio(comparison: WeightComparison, wrong: Tensor) -> float | None:
    """Return the median of got over expected in wrong places; None if it is 0, or there are few places."""
    expected, got = comparison.expected, comparison.got
    usable = wrong & (expected != 0) & expected.isfinite() & got.isfinite()
    if int(usable.sum()) < MIN_ERRORS:
        return None
    return float((got[usable].double() / expected[usable].double()).median()) or None


def wrong_biases(comparison: WeightComparison) -> Iterator[Hypothesis]:
    """Yield a bias missing or added twice, as one-hot inputs show it."""
    if comparison.bias is not None:
        column = comparison.bias.float()[:, None]
        yield Hypothesis("bias-missing", "no bias", lambda: comparison.expected - column)
        yield Hypothesis("bias-twice", "the bias added twice", lambda: comparison.expected + column)


def find_non_numbers(comparison: WeightComparison, wrong: Tensor) -> tuple[str, str] | None:
    """Return fault and description if nearly all errors are NaN, infinite, or a rectangle of zeros."""
    count = int(wrong.sum())
    got = comparison.got[wrong]
    if int(got.isnan().sum()) >= MIN_KIND_SHARE * count:
        return "never-written", "NaN where numbers belong: nothing was written there"
    if int(got.isinf().sum()) >= MIN_KIND_SHARE * count:
        return "overflown", "infinities where numbers belong"
    zeros = wrong & (comparison.got == 0)
    rows, columns = (torch.nonzero(zeros.any(axis)).flatten() for axis in (1, 0))
    if int(zeros.sum()) < max(MIN_ERRORS, MIN_KIND_SHARE * count) or not rows.numel():
        return None
    tile = comparison.got[int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]
    if int((tile == 0).sum()) < MIN_KIND_SHARE * tile.numel():
        return None
    ranges = ((int(rows[0]), int(rows[-1]) + 1), (int(columns[0]), int(columns[-1]) + 1))
    if (rank := _missing_rank(comparison, ranges)) is not None:
        return "rank-missing", f"zeros in the place of rank {rank}'s share"
    return "left-out", "zeros where numbers belong: a tile was left out"


def _missing_rank(comparison: WeightComparison, ranges: tuple[Range, Range]) -> int | None:
    """Return the rank of several whose share covers the same ranges of outputs and inputs, or None."""
    if comparison.rank is not None or comparison.world < 2:
        return None
    whole = tuple((0, size) for size in comparison.expected.shape)
    for axis, (size, other) in enumerate(zip(comparison.expected.shape, (1, 0), strict=True)):
        share, (start, stop) = size // comparison.world, ranges[axis]
        if ranges[other] == whole[other] and start % share == 0 and stop - start == share:
            return start // share
    return None
