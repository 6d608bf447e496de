"""Dequantized values of a weight, with its input factors applied."""

from torch import Tensor

from qload.spec import Weight


def meant(weight: Weight) -> Tensor:
    """Return the matrix that inputs are multiplied by, (N, K) float32, with the input factors applied."""
    return with_factors(weight, weight.dequantize())


def with_factors(weight: Weight, values: Tensor) -> Tensor:
    """Multiply (N, K) values by the input factors of a weight."""
    return values if weight.input_factors is None else values * weight.input_factors.float()
