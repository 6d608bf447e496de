"""A layout as one line in einops notation: where each element lies, and the way back.

    Order("(kp i) n -> kp n i", i=8)

The axes of a tensor are taken apart into digits (left), outermost first, and the digits put
together into other axes (right). Every digit stands once on each side, so the line read
backwards is the inverse. At most one digit of an axis may lack a size: it follows from the tensor.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from qload import native
from qload.errors import ArgumentError, PatternError

_TOKEN = re.compile(r"\(|\)|[a-z]+|\S")

AxisDigits = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Order:
    """A permutation of mixed-radix digits, as `"(a b) c -> a (c b)"` with the digits' sizes.

    PatternError where the line is no permutation, or leaves two digits of an axis open.

    Parameters
    ----------
    pattern
        The digits of each axis before and after, outermost first.
    sizes
        The size of each digit but the one of an axis that follows from the tensor.

    Examples
    --------
    >>> import torch
    >>> from qload import Order
    >>> pairs = Order("(half place) -> (place half)", half=2)
    >>> pairs.apply(torch.arange(6))
    tensor([0, 3, 1, 4, 2, 5])
    >>> pairs.undo(pairs.apply(torch.arange(6)))
    tensor([0, 1, 2, 3, 4, 5])
    """

    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()

    def __init__(self, pattern: str, **sizes: int) -> None:
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "sizes", tuple(sorted(sizes.items())))
        self._check()

    def apply(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """The `tensor` in this order; shape of the left side -> shape of the right side, contiguous.

        PatternError for a shape that does not fit. `out`: a contiguous tensor to write it to, which is
        returned.
        """
        return self._move(tensor, self.left, self.right, out)

    def undo(self, tensor: Tensor) -> Tensor:
        """The inverse of `apply`: `tensor`, of the right side's shape -> the left side's, contiguous."""
        return self._move(tensor, self.right, self.left)

    @cached_property
    def left(self) -> AxisDigits:
        """The digits of each axis of a tensor in plain order, outermost first."""
        return parse_side(self.pattern, self.pattern.split("->")[0])

    @cached_property
    def right(self) -> AxisDigits:
        """The digits of each axis of a tensor in this order, outermost first."""
        return parse_side(self.pattern, self.pattern.split("->")[1])

    def granule(self, axis: int) -> int:
        """Where the plain tensor may be cut along `axis`: at multiples of this.

        The outermost digit of an axis is free, so a cut has to be a multiple of the inner ones.
        """
        return prod(self._size[digit] for digit in self.left[axis][1:])

    @cached_property
    def _size(self) -> dict[str, int]:
        return dict(self.sizes)

    def _move(
        self, tensor: Tensor, source: AxisDigits, target: AxisDigits, out: Tensor | None = None
    ) -> Tensor:
        size = self.digits(tuple(tensor.shape), source)
        wide = fresh(tensor, [prod(size[digit] for digit in group) for group in target], tensor.dtype, out)
        here, there = strides(source, size, tensor.stride()), strides(target, size, wide.stride())
        moves = [native.Digit(size[digit], here[digit], there[digit]) for digit in size]
        if native.move(tensor, wide, 8 * tensor.itemsize, moves):
            return wide
        digits = [digit for group in source for digit in group]
        wanted = [digit for group in target for digit in group]
        apart = tensor.reshape([size[digit] for digit in digits])
        moved = apart.permute([digits.index(digit) for digit in wanted])
        wide.view([size[digit] for digit in wanted]).copy_(moved)
        return wide

    def digits(self, shape: tuple[int, ...], groups: AxisDigits) -> dict[str, int]:
        """The size of each digit, from a `shape` and the digits of its axes (`groups`); or PatternError."""
        if len(shape) != len(groups):
            raise PatternError(self.pattern, f"needs {len(groups)} axes, got shape {shape}")
        size = dict(self._size)
        for extent, group in zip(shape, groups, strict=True):
            inner = prod(self._size[digit] for digit in group if digit in self._size)
            free = [digit for digit in group if digit not in self._size]
            if extent % inner or (not free and extent != inner):
                need = f"a multiple of {inner}" if free else str(inner)
                raise PatternError(
                    self.pattern, f"axis ({' '.join(group)}) has to be {need}, got {extent} in shape {shape}"
                )
            size.update((digit, extent // inner) for digit in free)
        return size

    def _check(self) -> None:
        if self.pattern.count("->") != 1:
            raise PatternError(self.pattern, "needs exactly one '->'")
        sides = [[digit for group in side for digit in group] for side in (self.left, self.right)]
        for digits in sides:
            twice = sorted({digit for digit in digits if digits.count(digit) > 1})
            if twice:
                raise PatternError(self.pattern, f"{', '.join(twice)} stands twice on one side")
        lone = sorted(set(sides[0]) ^ set(sides[1]))
        if lone:
            raise PatternError(self.pattern, f"{', '.join(lone)} stands on one side only: not a permutation")
        strange = sorted(set(self._size) - set(sides[0]))
        if strange:
            raise PatternError(self.pattern, f"has no {', '.join(strange)}, but a size for it")
        for digit, size in self.sizes:
            if size < 1:
                raise PatternError(self.pattern, f"{digit} needs a size of at least 1, got {size}")
        for group in self.left + self.right:
            free = [digit for digit in group if digit not in self._size]
            if len(free) > 1:
                raise PatternError(
                    self.pattern,
                    f"({' '.join(group)}) leaves {' and '.join(free)} open: give all sizes but one",
                )


def strides(groups: AxisDigits, size: Mapping[str, int], of_axes: Sequence[int]) -> dict[str, int]:
    """The stride of each digit, from those of the axes that the digits make."""
    found = {}
    for group, stride in zip(groups, of_axes, strict=True):
        for digit in reversed(group):
            found[digit] = stride
            stride *= size[digit]
    return found


def fresh(like: Tensor, shape: Sequence[int], dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """A tensor to write to: `out`, which has to be one, or a new one on the device of another."""
    if out is None:
        return native.in_large_pages(like.new_empty(shape, dtype=dtype))
    apart = out.untyped_storage().data_ptr() != like.untyped_storage().data_ptr()
    got = tuple(out.shape), out.dtype, out.device
    if got != (tuple(shape), dtype, like.device) or not out.is_contiguous() or not (apart or not out.numel()):
        raise ArgumentError(
            "out",
            f"a contiguous {str(dtype).removeprefix('torch.')} tensor {tuple(shape)} on {like.device}, "
            "with no memory in common with what it is made of",
            f"{str(out.dtype).removeprefix('torch.')} {tuple(out.shape)} on {out.device}",
        )
    return out


def parse_side(pattern: str, side: str) -> AxisDigits:
    """One side of a pattern -> its axes, each a tuple of digits."""
    groups: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    for token in _TOKEN.findall(side):
        if token == "(":
            if inside is not None:
                raise PatternError(pattern, "a parenthesis inside a parenthesis")
            inside = []
        elif token == ")":
            if not inside:
                raise PatternError(pattern, "an empty parenthesis" if inside == [] else "')' without '('")
            groups.append(tuple(inside))
            inside = None
        elif not token.isalpha():
            raise PatternError(pattern, f"cannot read {token!r}")
        elif inside is None:
            groups.append((token,))
        else:
            inside.append(token)
    if inside is not None:
        raise PatternError(pattern, "'(' without ')'")
    return tuple(groups)
