"""Experts in float64 as plain numbers, with what float32 may be off by: every step adds what it can cost."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qload.kernels.bounds import Bounded, bound_gated_activation, excess, product


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
        self,
        x: Bounded,
        kind: str,
        alpha: float | None = None,
        limit: float | None = None,
        rounded: torch.dtype | None = None,
    ) -> Bounded:
        """`rounded`: what both sides of a product may be rounded to, if not float32."""

        def times(rows: Bounded, matrix: Tensor, bias: Tensor | None) -> Bounded:
            taken = rows if rounded is None else rows.rounded_to(rounded)
            return product(taken, matrix, bias, rounded)

        gate, up = times(x, self.gate, self.gate_bias), times(x, self.up, self.up_bias)
        return times(bound_gated_activation(gate, up, kind, alpha, limit), self.down, self.down_bias)


def assert_within(got: Tensor, want: Bounded) -> None:
    """`got` is no further from what is exact than float32 explains, and one rounding to its own dtype."""
    __tracebackhide__ = True
    off = excess(got, want)
    wrong = (~(off <= 1)).nonzero()
    if wrong.numel():
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{at} is {off[at]:g} times as far off as rounding can cost; "
            f"{wrong.shape[0]} of {off.numel()} are"
        )
