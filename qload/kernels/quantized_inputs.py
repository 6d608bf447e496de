"""Quantized inputs in the form of a product's demand: codes, numbers, or values."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from qload.kernels.activations import QuantizedActivations

HALF_RANGE = 8  # of the exponents of float16: tokens are brought below 2**this
CODE_BITS = 9  # codes less zero points are below 2**this
LEAST_EXPONENT = -100  # of what tokens are divided by, which float32 holds


class Inputs(Protocol):
    """Quantized inputs (M, K); `steps` and `zero_points` exist after the first demand."""

    @property
    def x(self) -> Tensor:
        """A tensor of their shape, on their device."""

    @property
    def steps(self) -> Tensor:
        """Values of code 1: one, (M, 1) or (M, K / size), float32 or float64."""

    @property
    def zero_points(self) -> Tensor | None:
        """Whole numbers, shaped alike, or None."""

    @property
    def wide(self) -> bool:
        """True for float64."""

    @property
    def one_step(self) -> bool:
        """True for one scale per token."""

    @property
    def has_zeros(self) -> bool:
        """True for codes with zero points."""

    def codes(self, dtype: torch.dtype, rows: int = 0) -> Tensor:
        """Codes (rows or M, K), e4m3 or int8; after the tokens a row of ones for zero points, then zeros."""

    def counted(self, dtype: torch.dtype) -> Tensor:
        """Codes (M, K) less their zero points, exact in `dtype`."""

    def meant(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Values (M, K) of the codes over a power of two for each token, rounded; the powers (M, 1)."""


@dataclass(frozen=True)
class MadeInputs:
    """Inputs quantized by plain torch."""

    made: QuantizedActivations

    @property
    def x(self) -> Tensor:
        """Codes, with the shape and device of the inputs."""
        return self.made.codes

    @property
    def steps(self) -> Tensor:
        """Values of code 1."""
        return self.made.steps

    @property
    def zero_points(self) -> Tensor | None:
        """Whole numbers, or None."""
        return self.made.zero_points

    @property
    def wide(self) -> bool:
        """True for float64."""
        return self.made.codes.dtype == torch.float64

    @property
    def one_step(self) -> bool:
        """True for one scale per token."""
        return self.made.steps.shape[-1] == 1

    @property
    def has_zeros(self) -> bool:
        """True for codes with zero points."""
        return self.made.zero_points is not None

    def codes(self, dtype: torch.dtype, rows: int = 0) -> Tensor:
        """Codes (rows or M, K), e4m3 or int8; after the tokens a row of ones for zero points, then zeros."""
        codes, M = self.made.codes.to(dtype), self.made.codes.shape[0]
        if rows > M:
            codes = pad(codes, (0, 0, 0, rows - M))
            if self.has_zeros:
                codes[M].fill_(1)
        return codes

    def counted(self, dtype: torch.dtype) -> Tensor:
        """Codes (M, K) less their zero points, exact in `dtype`."""
        return self.made.counted().to(dtype)

    def meant(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Values (M, K) of the codes over a power of two for each token, rounded; the powers (M, 1)."""
        row = _powers(self.made.steps).expand(self.x.shape[0], 1)
        return (self.made.dequantize() / row).to(dtype), row


def _powers(steps: Tensor) -> Tensor:
    """Powers of two for tokens, by their largest step; values divided by them are below 2**`HALF_RANGE`."""
    largest = steps.abs().amax(-1, keepdim=True) if steps.numel() else steps.new_zeros(steps.shape[0], 1)
    exponent = torch.frexp(largest).exponent + CODE_BITS - HALF_RANGE
    return torch.exp2(exponent.clamp(min=LEAST_EXPONENT).to(steps.dtype))
