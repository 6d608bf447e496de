"""Mistakes in scales: another group's, another order's, none, twice, of another type."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from qload.diagnosis.misreading import Misreading, clamped, neighbours, rolled, with_scales
from qload.layouts import marlin
from qload.spec import Codes

HALVES = ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16))


def of_another_group(codes: Codes) -> Iterator[Misreading]:
    """One group too far."""
    for which, step in neighbours(codes.scales.shape[1]):
        words = f"scales of the group {which}"
        yield with_scales(codes, "scales-of-another-group", words, partial(rolled, axis=1, step=step))


def others(codes: Codes) -> Iterator[Misreading]:
    """All other mistakes in scales."""
    for which, step in neighbours(codes.scales.shape[1]):
        words = f"scales of the group {which}"
        yield with_scales(codes, "scales-of-another-group", words, partial(clamped, axis=1, step=step))
    for which, step in neighbours(codes.scales.shape[0]):
        words = (
            f"scales of the output {which}"
            if codes.n_group is None
            else f"scales of the row of blocks {which}"
        )
        for made in (rolled, clamped):
            yield with_scales(codes, "scales-of-another-output", words, partial(made, axis=0, step=step))
    for axis, what in ((1, "groups"), (0, "outputs")):
        if codes.scales.shape[axis] > 1:
            first = partial(_first, axis=axis)
            yield with_scales(codes, "scales-of-the-first", f"the first scale for all {what}", first)
    yield with_scales(codes, "scales-missing", "no scales", torch.ones_like)
    yield with_scales(codes, "scales-twice", "scales applied twice", torch.square)
    yield with_scales(codes, "scales-inverted", "scales inverted", torch.reciprocal)
    yield from _of_another_shape(codes)
    yield from _of_another_type(codes)


def _first(scales: Tensor, axis: int) -> Tensor:
    return scales.narrow(axis, 0, 1).expand_as(scales)


def _of_another_shape(codes: Codes) -> Iterator[Misreading]:
    """Transposed, or in the order of Marlin's kernels, which permute scales within 64 outputs or 32."""
    rows, columns = codes.scales.shape
    if rows > 1 and columns > 1:
        yield with_scales(
            codes, "scales-transposed", "scales transposed", lambda scales: scales.T.reshape(rows, columns)
        )
    if rows != codes.codes.shape[0]:
        return
    for order, width, what in (
        (marlin.SCALES_GROUPED, 64, "of groups"),
        (marlin.SCALES_PER_COLUMN, 32, "of whole columns"),
    ):
        if rows % width == 0:
            words = f"scales in Marlin's order {what}"
            yield with_scales(codes, "scale-order", words, partial(_ordered, order.apply))
            yield with_scales(codes, "scale-order", f"{words}, undone", partial(_ordered, order.undo))


def _ordered(done: Callable[[Tensor], Tensor], scales: Tensor) -> Tensor:
    """(N, G), moved as (G, N)."""
    return done(scales.T.contiguous()).T


def _of_another_type(codes: Codes) -> Iterator[Misreading]:
    for own, other in HALVES:
        narrow = codes.scales.to(own)
        if bool((narrow.float() == codes.scales.float()).all()):
            names = (str(dtype).removeprefix("torch.") for dtype in (own, other))
            made = partial(_read_as, own, other)
            yield with_scales(codes, "scale-type", "{} scales read as {}".format(*names), made)


def _read_as(own: torch.dtype, other: torch.dtype, scales: Tensor) -> Tensor:
    return scales.to(own).contiguous().view(other).float()
