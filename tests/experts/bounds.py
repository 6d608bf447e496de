"""Experts in float64, with what float32 may be off by: every step adds what its roundings can cost.

A value is exact for exact inputs; its error bounds how far the same formula lies from it in float32, whatever
the order of its sums. No number here was measured: u = 2**-24 is half the distance of neighbours of float32,
n roundings cost a factor of 1 + n u / (1 - n u), and a slope is the largest that a function has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import e, pi, sqrt

import torch
from torch import Tensor

UNIT = 2.0**-24
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Bounded:
    """Exact values, float64, and how far those of float32 may be from them."""

    value: Tensor
    error: Tensor

    def __mul__(self, other: "Bounded") -> "Bounded":
        value = self.value * other.value
        carried = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return rounded(value, carried)

    def __add__(self, other: "Bounded") -> "Bounded":
        return rounded(self.value + other.value, self.error + other.error)

    def __getitem__(self, at: slice | int) -> "Bounded":
        return Bounded(self.value[..., at], self.error[..., at])

    def clamp(self, least: float | None, most: float | None) -> "Bounded":
        return Bounded(self.value.clamp(least, most), self.error)


def roundings(count: int) -> float:
    return count * UNIT / (1 - count * UNIT)


def rounded(value: Tensor, carried: Tensor) -> Bounded:
    """The result of one operation, whose inputs bring an error along."""
    return Bounded(value, carried + (value.abs() + carried) * UNIT + TINY)


def exact(tensor: Tensor | float) -> Bounded:
    value = torch.as_tensor(tensor).double()
    return Bounded(value, torch.zeros_like(value))


def linear(x: Bounded, matrix: Tensor, bias: Tensor | None = None) -> Bounded:
    """K products and as many additions, and one of the bias."""
    w, added = matrix.double(), torch.zeros(()) if bias is None else bias.double()
    size = (x.value.abs() + x.error) @ w.abs().T + added.abs()
    error = x.error @ w.abs().T + roundings(x.value.shape[-1] + 2) * size + TINY
    return Bounded(x.value @ w.T + added, error)


def function(x: Bounded, of: Callable[[Tensor], Tensor], slope: float, cost: Tensor) -> Bounded:
    return Bounded(of(x.value), slope * x.error + cost + TINY)


def sigmoid(x: Bounded) -> Bounded:
    """Of slope 1/4; an exponential is 1 ulp off, 2 u, and a sum and a division follow."""
    value = torch.sigmoid(x.value)
    return function(x, torch.sigmoid, 1 / 4, value * roundings(5))


def silu(x: Bounded) -> Bounded:
    """Of slope s + x s (1 - s) <= 1 + x exp(-x) <= 1 + 1/e; a product more than a sigmoid."""
    of = torch.nn.functional.silu
    return function(x, of, 1 + 1 / e, of(x.value).abs() * roundings(6))


def gelu(x: Bounded) -> Bounded:
    """Of slope <= 1 + |x| phi(x) <= 1 + phi(1); x / 2 (1 + erf(x / sqrt 2)) has 8 u at most in its factor."""
    of = torch.nn.functional.gelu
    return function(x, of, 1 + 1 / sqrt(2 * pi * e), x.value.abs() * roundings(8 + 2))


def gelu_tanh(x: Bounded) -> Bounded:
    """x / 2 (1 + tanh p), x p' <= 3 p, and p / cosh(p)**2 <= 1/2, so that the slope is below 1 + 3/4."""

    def of(value: Tensor) -> Tensor:
        return torch.nn.functional.gelu(value, approximate="tanh")

    return function(x, of, 1 + 3 / 4, x.value.abs() * roundings(12 + 2))


PLAIN: Mapping[str, Callable[[Bounded], Bounded]] = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}


def clamped_swiglu(gate: Bounded, up: Bounded, alpha: float, limit: float) -> Bounded:
    """(up + 1) * gate * sigmoid(alpha * gate), with alpha rounded to float32."""
    gate, up = gate.clamp(None, limit), up.clamp(-limit, limit)
    rounded_alpha = rounded(torch.tensor(alpha).double(), torch.zeros((), dtype=torch.float64))
    return (up + exact(1.0)) * (gate * sigmoid(gate * rounded_alpha))


def between(gate: Bounded, up: Bounded, kind: str, alpha: float | None, limit: float | None) -> Bounded:
    """What a gated activation makes of gate and up."""
    if alpha is not None and limit is not None:
        return clamped_swiglu(gate, up, alpha, limit)
    return PLAIN[kind](gate) * up


@dataclass(frozen=True)
class Matrices:
    """One expert as plain numbers: gate and up (I, H), down (H, I), and their biases."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __call__(
        self, x: Bounded, kind: str, alpha: float | None = None, limit: float | None = None
    ) -> Bounded:
        gate, up = linear(x, self.gate, self.gate_bias), linear(x, self.up, self.up_bias)
        return linear(between(gate, up, kind, alpha, limit), self.down, self.down_bias)


def assert_within(got: Tensor, want: Bounded) -> None:
    """`got` is no further from what is exact than float32 explains, and one rounding to its own dtype."""
    __tracebackhide__ = True
    own = torch.finfo(got.dtype)
    budget = want.error + (want.value.abs() + want.error) * own.eps / 2 + own.tiny
    error = (got.double() - want.value).abs()
    wrong = (~(error <= budget)).nonzero()
    if wrong.numel():
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{at} is off by {error[at]:g}, rounding can cost {budget[at]:g}; "
            f"{wrong.shape[0]} of {error.numel()} are"
        )
