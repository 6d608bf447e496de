"""Dequantized values of a weight, with its input factors applied."""

from torch import Tensor

from qload.spec import Weight


def meant(weight: Weight) -> Tensor:
    """What a weight does to inputs, (N, K) float32; factors of these are a part of it."""
    return with_factors(weight, weight.dequantize())


def with_factors(weight: Weight, values: Tensor) -> Tensor:
    """A reading of a weight, times the factors of its inputs."""
    return values if weight.input_factors is None else values * weight.input_factors.float()
