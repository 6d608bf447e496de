"""What a product is exactly, and what rounding can cost whoever computes it: no number here was measured.

u is half a unit of a type, and n roundings cost a factor of 1 + n u / (1 - n u) at most. Of float32 u is
2**-24. A value is exact for exact inputs; its error bounds how far the same formula lies from it, whatever
the order of its sums, where each step is in float32 and what a type says is rounded to is rounded to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qload.kernels import declared, sums
from qload.kernels.declared import Activations, Maximum
from qload.kernels.plans import quantizes
from qload.spec import Weight, outputs, ranges

UNIT = 2.0**-24
TINY = torch.finfo(torch.float32).tiny
TENSOR_CORES = 2.0**-11  # what sums of e4m3 are off by, of the sum of absolute values: 13 bits, two short
SLICE = 16 << 20  # numbers of a weight that are dequantized at once


@dataclass(frozen=True)
class Bounded:
    """Exact values, and how far those that were computed may be from them.

    Attributes
    ----------
    value, error
        float64, of one shape.
    """

    value: Tensor
    error: Tensor

    def __mul__(self, other: "Bounded") -> "Bounded":
        """Their product, rounded once."""
        value = self.value * other.value
        carried = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return rounded(value, carried)

    def __add__(self, other: "Bounded") -> "Bounded":
        """Their sum, rounded once."""
        return rounded(self.value + other.value, self.error + other.error)

    def __getitem__(self, at: slice | int) -> "Bounded":
        """Some of the last axis."""
        return Bounded(self.value[..., at], self.error[..., at])

    def clamp(self, least: float | None, most: float | None) -> "Bounded":
        """Cut off at numbers that float32 has, or rounds the same way for both."""
        return Bounded(self.value.clamp(least, most), self.error)

    def rounded_to(self, dtype: torch.dtype) -> "Bounded":
        """What is left after one rounding to a `dtype`; below its normal numbers, a unit of these."""
        own = torch.finfo(dtype)
        return Bounded(
            self.value, self.error + (self.value.abs() + self.error) * own.eps / 2 + own.smallest_normal
        )


def roundings(count: int) -> float:
    """What `count` roundings to float32 cost, as a share of the result."""
    return count * UNIT / (1 - count * UNIT)


def rounded(value: Tensor, carried: Tensor) -> Bounded:
    """The result of one operation in float32: its `value`, where its inputs bring an error along."""
    return Bounded(value, carried + (value.abs() + carried) * UNIT + TINY)


def exact(tensor: Tensor | float) -> Bounded:
    """A `tensor` as it is."""
    value = torch.as_tensor(tensor).double()
    return Bounded(value, torch.zeros_like(value))


def product(
    x: Bounded,
    matrix: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    steps: int = 2,
    more: float = 0.0,
) -> Bounded:
    """x (M, K) times a `matrix` (N, K), plus a `bias` (N,): K products, as many sums, and what comes on top.

    Parameters
    ----------
    x, matrix, bias
        What is multiplied, of floats that are exact but for the error of x.
    dtype
        What the matrix is rounded to first, and the product before the bias is added; None: float32 has both.
    steps
        How many roundings to float32 there are beside those of K sums.
    more
        What sums are off by besides, as a share of the sum of absolute values.
    """
    w = matrix.double()
    added = w.new_zeros(()) if bias is None else bias.double()
    inputs, sizes = x.value.abs() + x.error, w.abs()
    size = inputs @ sizes.T + added.abs()
    share = roundings(x.value.shape[-1] + steps) + more
    error = x.error @ sizes.T + TINY
    if dtype is not None:
        own = torch.finfo(dtype)
        share += own.eps / 2 * (1 if bias is None else 2)
        error = error + inputs.sum(-1, keepdim=True) * own.smallest_normal * own.eps / 2
    return Bounded(x.value @ w.T + added, error + share * size)


def of_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    activations: Activations = "declared",
    maximum: Maximum = None,
    *,
    converted: bool = False,
) -> Bounded:
    """What x (M, K) times a `weight` is, (M, N), and what a kernel may be off by before it rounds its result.

    The weight is rounded to the type of x, and what a declared quantizer makes of x as well; the weight is
    dequantized in slices. `bias` (N,), `activations` and `maximum` as `Weight.get_linear` has them.
    `converted`: whether the kernel's scales were rounded to the type of x before.
    """
    steps, more = 2 + (weight.input_factors is not None), 0.0
    if converted:
        half = torch.finfo(x.dtype).eps / 2
        more += half * (1 + half)
    if quantizes(weight, activations) and weight.activations is not None:
        steps += 3  # a scale of the inputs, one of the weight, a zero point
        more += TENSOR_CORES * (x.is_cuda and weight.activations.type == "float" and x.dtype in sums.NARROW)
    taken = list(_inputs(x, weight, activations, maximum))
    value = torch.empty(x.shape[0], weight.layer.N, dtype=torch.float64, device=x.device)
    error = torch.empty_like(value)
    for start, stop in ranges(weight, max(1, SLICE // max(1, weight.layer.K))):
        matrix = outputs(weight, start, stop).dequantize()
        for inputs, rows in taken:
            here = slice(max(start, rows.start), min(stop, rows.stop))
            if here.start < here.stop:
                own = matrix[here.start - start : here.stop - start]
                added = None if bias is None else bias[here]
                made = product(inputs, own, added, x.dtype, steps=steps, more=more)
                value[:, here], error[:, here] = made.value, made.error
    return Bounded(value, error)


def _inputs(
    x: Tensor, weight: Weight, activations: Activations, maximum: Maximum
) -> Iterator[tuple[Bounded, slice]]:
    """What is multiplied, and by which outputs."""
    factors = weight.input_factors
    if not quantizes(weight, activations):
        yield exact(x if factors is None else x.double() * factors.double()), slice(0, weight.layer.N)
        return
    taken = x if factors is None else x.to(torch.promote_types(x.dtype, torch.float32)) * factors.float()
    for made, rows in declared.quantized(taken, weight, maximum):
        yield exact(made.dequantize()).rounded_to(x.dtype), rows


def excess(y: Tensor, want: Bounded) -> Tensor:
    """How far y is from what is exact, in units of what rounding can cost; NaN and all above 1 is wrong.

    Infinity is 0 off where rounding can lead beyond the largest number of y's type, and on that side.
    """
    budget = want.rounded_to(y.dtype).error
    off = (y.double() - want.value).abs() / budget
    beyond = want.value.abs() + budget > torch.finfo(y.dtype).max
    return off.masked_fill(y.isinf() & beyond & (y.sign() == want.value.sign()), 0)
