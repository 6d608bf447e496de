"""Mistakes in where codes lie and in what they stand for: order in words, byte order, sign, float type."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from qload.diagnosis.misreading import Misreading
from qload.layouts import fp4
from qload.spec import Codes

EVEN_FIRST = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's order of the eight codes in a word
SWAPPED = (1, 0, 3, 2, 5, 4, 7, 6)  # the two codes of a byte, the high one first
REVERSED = (7, 6, 5, 4, 3, 2, 1, 0)
WORD = 32  # bits
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def in_words(codes: Codes, stored: tuple[int, ...] | None) -> Iterator[Misreading]:
    """The codes of each word in another order; `stored`: in which they lie, where that is not 0, 1, 2, ..."""
    if codes.bits == WORD // len(EVEN_FIRST):
        even, order = torch.tensor(EVEN_FIRST), "code-order"
        yield from _permuted(codes, order, "even codes first", even)
        yield from _permuted(codes, order, "even codes first undone", even.argsort())
        yield from _permuted(
            codes, order, "codes of a byte swapped", _as_stored(torch.tensor(SWAPPED), stored)
        )
    if codes.bits in (2, 4, 8):
        way = torch.arange(WORD // codes.bits).reshape(4, -1).flip(0).flatten()
        yield from _permuted(
            codes, "byte-order", "bytes of a word reversed (big-endian)", _as_stored(way, stored)
        )


def reversed_in_words(codes: Codes, stored: tuple[int, ...] | None) -> Iterator[Misreading]:
    """The first code of a word in its high bits."""
    if codes.bits == WORD // len(REVERSED):
        yield from _permuted(
            codes, "code-order", "codes of a word reversed", _as_stored(torch.tensor(REVERSED), stored)
        )


def values(codes: Codes) -> Iterator[Misreading]:
    """The same bits, which stand for other numbers."""
    half = 2 ** (codes.bits - 1)
    yield _with(codes, "code-sign", "the sign bit of codes inverted", lambda plain: plain ^ half)
    yield _with(codes, "code-sign", "the sign bit of codes lost", lambda plain: plain & (half - 1))
    if codes.lookup is None:
        yield _with(codes, "code-sign", "codes of two's complement", lambda plain: plain - 2 * (plain & half))
        return
    for words, table in _tables(codes):
        if not torch.equal(table.nan_to_num(), codes.lookup.float().nan_to_num()):
            yield Misreading("float-type", words, partial(replace, codes, lookup=table))


def _tables(codes: Codes) -> Iterator[tuple[str, Tensor]]:
    assert codes.lookup is not None
    device = codes.lookup.device
    if codes.bits == 8:
        every = torch.arange(256, device=device).to(torch.uint8)
        for dtype in EIGHT_BITS:
            yield f"codes of {str(dtype).removeprefix('torch.')}", every.view(dtype).float()
    elif codes.bits == 4:
        integers = torch.arange(16, device=device).float()
        yield "codes of e2m1", fp4.values(device)
        yield "codes of four-bit integers of two's complement", (integers + 8) % 16 - 8
        yield "codes of four-bit integers with a zero point of 8", integers - 8


def _with(codes: Codes, fault: str, words: str, made: Callable[[Tensor], Tensor]) -> Misreading:
    return Misreading(fault, words, lambda: replace(codes, codes=made(codes.plain().int())))


def _as_stored(way: Tensor, stored: tuple[int, ...] | None) -> Tensor:
    """An exchange of places in a word, its own inverse, as an exchange of the codes that lie there."""
    if stored is None or len(stored) != way.numel():
        return way
    lying = torch.tensor(stored)
    return lying[way][lying.argsort()]


def _permuted(codes: Codes, fault: str, words: str, way: Tensor) -> Iterator[Misreading]:
    """Along K or N; where there are zero points for each output, with them too, and they alone."""
    zeros = codes.zeros if codes.zeros is not None and codes.zeros.shape[0] == codes.codes.shape[0] else None
    turned = None if zeros is None else _turn(zeros, way, 0)
    moved = turned is not None and zeros is not None and not zeros.equal(turned)
    for axis, letter in ((1, "K"), (0, "N")):
        if codes.codes.shape[axis] % way.numel() == 0:
            yield Misreading(fault, f"{words} along {letter}", _turned(codes, way, axis, codes.zeros))
            if moved:
                both = f"{words} along {letter} and in zero points"
                yield Misreading(fault, both, _turned(codes, way, axis, turned))
    if moved:
        yield Misreading("zero-point-order", f"{words} in zero points", lambda: replace(codes, zeros=turned))


def _turned(codes: Codes, way: Tensor, axis: int, zeros: Tensor | None) -> Callable[[], Codes]:
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
