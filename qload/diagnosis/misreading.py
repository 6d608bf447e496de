"""Codes, scales and zero points as a program that gets one thing wrong reads them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qload.spec import Codes


@dataclass(frozen=True)
class Misreading:
    """One mistake.

    Attributes
    ----------
    fault
        The id of its class.
    words
        What is read, as in "read with zero points one lower".
    made
        The codes as they are then.
    """

    fault: str
    words: str
    made: Callable[[], Codes]


def with_scales(codes: Codes, fault: str, words: str, made: Callable[[Tensor], Tensor]) -> Misreading:
    """The same with other scales, made of its own (Gn, Gk)."""
    return Misreading(fault, words, lambda: replace(codes, scales=made(codes.scales)))


def with_zeros(codes: Codes, fault: str, words: str, made: Callable[[Tensor], Tensor]) -> Misreading:
    """The same with other zero points, made of its own (Gn, Gk); those have to be there."""
    zeros = codes.zeros
    assert zeros is not None
    return Misreading(fault, words, lambda: replace(codes, zeros=made(zeros)))


def neighbours(size: int) -> Iterator[tuple[str, int]]:
    """Which of several is taken instead of each, and by how much a tensor is rolled for it."""
    if size > 1:
        yield "before", 1
        yield "after", -1


def rolled(tensor: Tensor, axis: int, step: int) -> Tensor:
    """Rolled by `step` along `axis`."""
    return tensor.roll(step, axis)


def clamped(tensor: Tensor, axis: int, step: int) -> Tensor:
    """Rolled by `step` along `axis`, with the first or last one kept where nothing comes after it."""
    size = tensor.shape[axis]
    return tensor.index_select(axis, (torch.arange(size, device=tensor.device) - step).clamp(0, size - 1))
