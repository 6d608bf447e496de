"""Which lane of a warp reads a word: two digits of a layout's sentence say it, where kernels read so.

A matrix instruction hands each lane two columns 8 apart, by the digit c, and pairs of rows, by the digit t:
lane 4c + t. Marlin's orders and strips place what one lane takes side by side, so that it is a load or two.
"""

from math import prod

from qload.layouts import Packing

LANES = {"marlin": ("c", "t"), "marlin_24": ("c", "t"), "strips": ("c", "t")}
LOAD = 4  # words of one load, 16 bytes


def lane_of(layout: str, packing: Packing, code: tuple[int, int]) -> int | None:
    """The lane that reads the word of a code (row, column); None where no lane reads words as they lie."""
    digits = LANES.get(layout)
    if digits is None:
        return None
    sizes, lane = dict(packing.sizes), 0
    for digit in digits:
        lane = lane * sizes[digit] + _digit(packing, digit, code)
    return lane


def _digit(packing: Packing, digit: str, code: tuple[int, int]) -> int:
    """One digit of the place of a code, along the axis that it is part of."""
    sizes = dict(packing.sizes)
    for axis, at in zip(packing.codes.left, code, strict=True):
        if digit in axis:
            below = prod(sizes[other] for other in axis[axis.index(digit) + 1 :])
            return at // below % sizes[digit]
    raise KeyError(digit)
