"""Inputs that are quantized, as a product asks for them: codes, numbers, or what they stand for."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from qload.kernels.activations import QuantizedActivations

HALF_RANGE = 8  # of the exponents of float16: tokens are brought below 2**this
LEAST_EXPONENT = -100  # of what tokens are divided by, which float32 holds


class Inputs(Protocol):
    """Inputs (M, K) and what became of them. `steps` and `zero_points` are known once one was asked for."""

    @property
    def x(self) -> Tensor:
        """A tensor of their shape, on their device."""

    @property
    def steps(self) -> Tensor:
        """What a code of 1 stands for: one, (M, 1) or (M, K / size), float32 or float64."""

    @property
    def zero_points(self) -> Tensor | None:
        """Whole numbers, shaped alike, or None."""

    @property
    def wide(self) -> bool:
        """Whether they are in float64."""

    @property
    def one_step(self) -> bool:
        """Whether all inputs of a token share a scale."""

    @property
    def has_zeros(self) -> bool:
        """Whether codes have zero points."""

    def codes(self, dtype: torch.dtype, rows: int = 0) -> Tensor:
        """(rows or M, K), e4m3 or int8: zeros after the tokens, where codes have zero points ones first."""

    def counted(self, dtype: torch.dtype) -> Tensor:
        """(M, K): the codes less their zero points, in a type that holds them."""

    def meant(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(M, K) what codes stand for over a power of two for each token, rounded; the powers (M, 1)."""


@dataclass(frozen=True)
class MadeInputs:
    """Inputs that plain torch has quantized."""

    made: QuantizedActivations

    @property
    def x(self) -> Tensor:
        """The codes, of whose shape and device inputs are."""
        return self.made.codes

    @property
    def steps(self) -> Tensor:
        """What a code of 1 stands for."""
        return self.made.steps

    @property
    def zero_points(self) -> Tensor | None:
        """Whole numbers, or None."""
        return self.made.zero_points

    @property
    def wide(self) -> bool:
        """Whether they are in float64."""
        return self.made.codes.dtype == torch.float64

    @property
    def one_step(self) -> bool:
        """Whether all inputs of a token share a scale."""
        return self.made.steps.shape[-1] == 1

    @property
    def has_zeros(self) -> bool:
        """Whether codes have zero points."""
        return self.made.zero_points is not None

    def codes(self, dtype: torch.dtype, rows: int = 0) -> Tensor:
        """(rows or M, K), e4m3 or int8: zeros after the tokens, where codes have zero points ones first."""
        codes, M = self.made.codes.to(dtype), self.made.codes.shape[0]
        if rows > M:
            codes = pad(codes, (0, 0, 0, rows - M))
            if self.has_zeros:
                codes[M].fill_(1)
        return codes

    def counted(self, dtype: torch.dtype) -> Tensor:
        """(M, K): the codes less their zero points, in a type that holds them."""
        return self.made.counted().to(dtype)

    def meant(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(M, K) what codes stand for over a power of two for each token, rounded; the powers (M, 1)."""
        taken = self.made.dequantize()
        row = _powers(taken)
        return (taken / row).to(dtype), row


def _powers(x: Tensor) -> Tensor:
    """A power of two for each token (M, 1), by which x is divided to lie below 2**`HALF_RANGE`."""
    largest = x.abs().amax(-1, keepdim=True) if x.numel() else x.new_zeros(x.shape[0], 1)
    exponent = torch.frexp(largest).exponent - HALF_RANGE
    return torch.exp2(exponent.clamp(min=LEAST_EXPONENT).to(x.dtype))
