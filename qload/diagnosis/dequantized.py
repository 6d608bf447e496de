"""Dequantized values of a weight, with its input factors applied."""

from torch import Tensor

from qload.spec import Weight


def effective_weight(weight: Weight) -> Tensor:
    """Return the matrix that inputs are multiplied by, (N, K) float32, with the input factors applied."""
    return apply_input_factors(weight, weight.dequantize())


def apply_input_factors(weight: Weight, values: Tensor) -> Tensor:
    """Multiply (N, K) values by the input factors of a weight."""
    return values if weight.input_factors is None else values * weight.input_factors.float()
