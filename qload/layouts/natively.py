"""Packings as the native routines take them: where each code lies, or which bits of a run go where."""

from functools import cache
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor

from qload import native
from qload.layouts.order import strides

if TYPE_CHECKING:
    from qload.layouts.packing import Packing

Axis = list[native.Place]
MOST_WORDS = 32  # of a run, codes as well as words


def pack(packing: "Packing", codes: Tensor, words: Tensor) -> int | None:
    """int32 codes -> new words; all bits that the codes had, or None where torch has to do it."""
    if is_whole(packing):
        return native.pack(codes, packing.bits, *places(packing, tuple(codes.shape)), words)
    run = lanes(packing, codes, words)
    if run is None:
        return None
    fields = [native.Field(f.code, f.word, f.low, f.bit, f.width) for f in packing.fields]
    return native.fields(codes, words, fields, (run_of(packing), packing.words), *run)


def unpack(packing: "Packing", words: Tensor, codes: Tensor) -> bool:
    """Words -> new int32 codes, or False where torch has to do it."""
    if is_whole(packing):
        return native.unpack(words.contiguous(), packing.bits, *places(packing, tuple(codes.shape)), codes)
    run = lanes(packing, codes, words)
    if run is None:
        return False
    (code, word), there = run
    back = [native.Digit(lane.size, lane.target, lane.source) for lane in there]
    fields = [native.Field(f.word, f.code, f.bit, f.low, f.width) for f in packing.fields]
    return (
        native.fields(words, codes, fields, (packing.words, run_of(packing)), (word, code), back) is not None
    )


@cache
def is_whole(packing: "Packing") -> bool:
    """Whether words hold whole codes one after another, so that each digit of codes has one stride."""
    plain = [(f.code, f.low, f.word, f.bit) for f in packing.fields]
    return packing.bits in native.PACKED and plain == [
        (i, 0, 0, i * packing.bits) for i in range(run_of(packing))
    ]


@cache
def places(packing: "Packing", shape: tuple[int, ...]) -> tuple[Axis, Axis]:
    """The digits of each axis of codes, innermost first, with their strides in a whole packing's words."""
    order = packing.codes
    size = order.digits(shape, order.left)
    extents = [prod(size[digit] for digit in group) for group in order.right]
    stride = strides(order.right, size, [prod(extents[axis + 1 :]) for axis in range(len(extents))])
    rows, columns = (
        [native.Place(size[digit], stride[digit]) for digit in reversed(group)] for group in order.left
    )
    return rows, columns


def lanes(
    packing: "Packing", codes: Tensor, words: Tensor
) -> tuple[tuple[int, int], list[native.Digit]] | None:
    """The strides of a run's codes and of its words, and where runs lie; None: they have no one stride."""
    *_, run = packing.codes.right
    if len(run) > 1 or max(run_of(packing), packing.words) > MOST_WORDS:
        return None
    size = packing.codes.digits(tuple(codes.shape), packing.codes.left)
    here = strides(packing.codes.left, size, codes.stride())
    there = strides(packing.stored, {**size, "w": packing.words}, words.stride())
    runs = [native.Digit(size[digit], here[digit], there[digit]) for digit in size if digit not in run]
    runs.sort(key=lambda lane: (lane.target, lane.source), reverse=True)
    return (here[run[0]], there.get("w", 1)), runs


def run_of(packing: "Packing") -> int:
    """How many codes a run has."""
    return prod(size for digit, size in packing.codes.sizes if digit in packing.codes.right[-1])
