"""Stacks in other layouts: every expert repacked alone, one at a time, and stacked again."""

from typing import Any

from qload.errors import RepackError
from qload.experts.stack import Stack
from qload.experts.stacking import stacked
from qload.kernel_formats import repack, restore
from qload.spec import Weight


def repacked(stack: Stack, layout: str, whole: Stack | None, **options: Any) -> Stack:
    """Every expert as `qload.repack` makes it; `whole`: the stack that this is a share of."""
    meant = [None] * len(stack) if whole is None else whole
    pairs = zip(stack, meant, strict=True)
    made = (_repacked(weight, layout, whole=each, **options) for weight, each in pairs)
    return stacked(stack.layer.name, len(stack), made)


def restored(stack: Stack) -> Stack:
    """Every expert as `qload.restore` makes it."""
    return stacked(stack.layer.name, len(stack), map(restore, stack))


def _repacked(weight: Weight, layout: str, **options: Any) -> Weight:
    """One expert; RepackError with its name."""
    try:
        return repack(weight, layout, **options)
    except RepackError as error:
        raise RepackError(f"{weight.layer.name}: {weight.format}", layout, error.reason) from error
