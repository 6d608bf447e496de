"""Two packings as one list of digits: what a native routine needs to move codes from one to the other.

A digit (size, from, to, row) says that a code whose digit is one more lies `from` codes on in the one tensor
and `to` codes on in the other, and counts `row` rows more. Digits of one axis that two sentences cut in
different places are cut in both.
"""

from collections.abc import Sequence
from functools import cache
from math import prod

from qload.layouts.natively import common
from qload.layouts.order import Order, parse_side
from qload.layouts.packing import Packing, stream

Digit = tuple[int, int, int, int]
Place = tuple[int, int]  # a digit's size and stride, in codes

NATIVE_BITS = (2, 4, 8, 16, 32)


def moves(packing: Packing) -> bool:
    """Whether each code lies whole in one field of one word: neither a bit stream nor fields of its own."""
    whole = packing.words == 1 and packing.bits in NATIVE_BITS
    return whole and packing.fields == stream(packing.bits, 32 // packing.bits)


@cache
def places(order: Order, shape: tuple[int, ...]) -> tuple[tuple[Place, ...], ...]:
    """The digits of each plain axis, innermost first, and their strides in the ordered tensor."""
    size = order.digits(shape, order.left)
    stride, reached = {}, 1
    for group in reversed(order.right):
        for digit in reversed(group):
            stride[digit], reached = reached, reached * size[digit]
    return tuple(tuple((size[d], stride[d]) for d in reversed(group)) for group in order.left)


def shape_of(packing: Packing, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the words that hold codes of a plain shape."""
    groups = parse_side(packing.pattern, packing.pattern.split("->")[1])[:-1]
    size = packing.codes.digits(shape, packing.codes.left) | {"w": packing.words}
    return tuple(prod(size[digit] for digit in group) for group in groups)


def strided(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[Place, ...], ...]:
    """A tensor whose every axis is one digit."""
    return tuple(((extent, stride),) for extent, stride in zip(shape, strides, strict=True))


def starts(axis: Sequence[Place], count: int) -> list[int]:
    """Where each index of an axis lies, in codes."""
    found = [0]
    for size, stride in axis:
        found = [start + digit * stride for digit in range(size) for start in found]
    return found[:count]


def digits(
    source: Sequence[Sequence[Place]], target: Sequence[Sequence[Place]], rows: int | None = None
) -> list[Digit] | None:
    """The common digits of two orders of one shape; None where their cuts do not nest.

    `rows`: the axis whose rows are looked up.
    """
    found: list[Digit] = []
    for axis, (left, right) in enumerate(zip(source, target, strict=True)):
        both, reached = common(left, right), 1
        if both is None:
            return None
        for size, here, there in both:
            found.append((size, here, there, reached if axis == rows else 0))
            reached *= size
    return found
