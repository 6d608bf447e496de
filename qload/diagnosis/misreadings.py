"""A quantized weight as programs that get it wrong would read it: every known mistake in its codes."""

from collections.abc import Iterator

from qload.diagnosis import code_orders, groups, scales, zero_points
from qload.diagnosis.code_orders import EVEN_FIRST
from qload.diagnosis.misreading import Misreading
from qload.spec import Codes, Weight


def in_files(weight: Weight) -> Iterator[Misreading]:
    """The mistakes that files are known to hold: even beside what they were quantized from they stand out."""
    codes = weight.codes()
    yield from zero_points.off_by_one(codes)
    yield from scales.of_another_group(codes)
    yield from code_orders.in_words(codes, stored_order(weight))


def in_programs(codes: Codes, stored: tuple[int, ...] | None) -> Iterator[Misreading]:
    """The mistakes that kernels, packers and loaders are known to make, the likeliest first.

    `stored`: in which order the codes of a word lie, where that is not 0, 1, 2, ...
    """
    yield from zero_points.off_by_one(codes)
    yield from groups.in_order(codes)  # of two groups, those that are wrong have one another's scales too
    yield from scales.of_another_group(codes)
    yield from groups.misreadings(codes)
    yield from code_orders.in_words(codes, stored)
    yield from code_orders.reversed_in_words(codes, stored)
    yield from zero_points.others(codes)
    yield from code_orders.values(codes)
    yield from scales.others(codes)


def stored_order(weight: Weight) -> tuple[int, ...] | None:
    """Which code lies in each place of a word, the lowest first, where they do not lie in order."""
    return EVEN_FIRST if weight.format == "awq" else None
