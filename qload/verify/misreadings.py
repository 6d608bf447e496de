"""A quantized weight as programs that get it wrong would read it, to name what is wrong with a file."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from qload.spec import Codes, Weight
from qload.verify.comparison import meant, with_factors

EVEN_FIRST = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's order of the eight codes in a word
SWAPPED = (1, 0, 3, 2, 5, 4, 7, 6)  # the two codes of a byte, the high one first
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
    made_of = (_zeros(codes), _scales(codes), _orders(codes, EVEN_FIRST if weight.format == "awq" else None))
    found = {mistake: _whole(weight, made, want) for mistakes in made_of for mistake, made in mistakes}
    if reference.format == weight.format:
        other = reference.codes()
        found |= {mistake: _whole(weight, made, want) for mistake, made in _exchanged(codes, other)}
    return {**found, **dict(_shifted_words(weight, codes, want)), **dict(_shifted_rows(meant(weight), want))}


def _whole(weight: Weight, made: Callable[[], Codes], want: Tensor) -> Reading:
    return lambda: (with_factors(weight, made().dequantize().reshape(want.shape)), want)


def _zeros(codes: Codes) -> Iterator[tuple[str, Callable[[], Codes]]]:
    if (zeros := codes.zeros) is not None:
        yield "zero points one lower", lambda: replace(codes, zeros=zeros - 1)
        yield "zero points one higher", lambda: replace(codes, zeros=zeros + 1)


def _scales(codes: Codes) -> Iterator[tuple[str, Callable[[], Codes]]]:
    if codes.scales.shape[1] > 1:
        yield "scales of the group before", lambda: replace(codes, scales=codes.scales.roll(1, 1))
        yield "scales of the group after", lambda: replace(codes, scales=codes.scales.roll(-1, 1))


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


def _orders(codes: Codes, stored: tuple[int, ...] | None) -> Iterator[tuple[str, Callable[[], Codes]]]:
    """The codes of each word in another order; `stored`: in which they lie, where that is not 0, 1, 2, ..."""
    if codes.bits == WORD // len(EVEN_FIRST):
        even = torch.tensor(EVEN_FIRST)
        yield from _permuted(codes, "even codes first", even)
        yield from _permuted(codes, "even codes first undone", even.argsort())
        yield from _permuted(codes, "codes of a byte swapped", _as_stored(torch.tensor(SWAPPED), stored))
    if codes.bits in (2, 4, 8):
        order = torch.arange(WORD // codes.bits).reshape(4, -1).flip(0).flatten()
        yield from _permuted(codes, "bytes of a word reversed (big-endian)", _as_stored(order, stored))


def _as_stored(way: Tensor, stored: tuple[int, ...] | None) -> Tensor:
    """An exchange of places in a word, its own inverse, as an exchange of the codes that lie there."""
    if stored is None or len(stored) != way.numel():
        return way
    lying = torch.tensor(stored)
    return lying[way][lying.argsort()]


def _permuted(codes: Codes, words: str, way: Tensor) -> Iterator[tuple[str, Callable[[], Codes]]]:
    """Along K or N; where there are zero points for each output, with them too, and they alone."""
    zeros = codes.zeros if codes.zeros is not None and codes.zeros.shape[0] == codes.codes.shape[0] else None
    turned = zeros is not None and _turn(zeros, way, 0)
    for axis, letter in ((1, "K"), (0, "N")):
        if codes.codes.shape[axis] % way.numel() == 0:
            yield f"{words} along {letter}", _with(codes, way, axis, codes.zeros)
            if isinstance(turned, Tensor) and _differ(zeros, turned):
                yield f"{words} along {letter} and in zero points", _with(codes, way, axis, turned)
    if isinstance(turned, Tensor) and _differ(zeros, turned):
        yield f"{words} in zero points", lambda: replace(codes, zeros=turned)


def _with(codes: Codes, way: Tensor, axis: int, zeros: Tensor | None) -> Callable[[], Codes]:
    def made() -> Codes:
        turned = _turn(codes.plain(), way, axis)
        assert turned is not None
        return replace(codes, codes=turned, zeros=zeros)

    return made


def _turn(tensor: Tensor, way: Tensor, axis: int) -> Tensor | None:
    """Each run of as many elements as `way` has, in its order; None where they do not fill runs."""
    size, count = tensor.shape[axis], way.numel()
    if size % count:
        return None
    index = (torch.arange(0, size, count)[:, None] + way).flatten()
    return tensor.index_select(axis, index.to(tensor.device))


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
