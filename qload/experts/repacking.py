"""Stacks in other layouts: every expert repacked alone, one at a time, and stacked again."""

from typing import Any

from qload.experts.stack import Stack
from qload.experts.stacking import stacked
from qload.kernel_formats import repack, restore


def repacked(stack: Stack, layout: str, whole: Stack | None, **options: Any) -> Stack:
    """Every expert as `qload.repack` makes it; `whole`: the stack that this is a share of."""
    meant = [None] * len(stack) if whole is None else whole
    pairs = zip(stack, meant, strict=True)
    made = (repack(weight, layout, whole=each, **options) for weight, each in pairs)
    return stacked(stack.layer.name, len(stack), made)


def restored(stack: Stack) -> Stack:
    """Every expert as `qload.restore` makes it."""
    return stacked(stack.layer.name, len(stack), map(restore, stack))
