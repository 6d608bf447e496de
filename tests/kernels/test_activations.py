"""Inputs as the owners of their schemes quantize them: codes and scales bit for bit, y within a bound."""

from pathlib import Path

import pytest
import torch

from qload.kernels.activations import quantize
from tests.kernels.activation_cases import FOLDERS, distance, read

every_case = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@every_case
def test_codes_and_scales_are_the_owners(folder: Path) -> None:
    case = read(folder)
    made = quantize(case.x, case.scheme, *case.stored)

    assert torch.equal(made.codes, case.owner["expected.x_codes"])
    assert torch.equal(made.scales, case.owner["expected.x_scale"])
    zeros = case.owner.get("expected.x_zero_point")
    if zeros is None:
        assert made.zero_points is None
    else:
        assert made.zero_points is not None
        assert torch.equal(made.zero_points, zeros.float())
    assert torch.equal(made.dequantize(), case.owner["expected.x_dequant"])


@every_case
def test_the_product_is_the_owners(folder: Path) -> None:
    case = read(folder)
    weight, x = case.weight, case.owner["expected.x_dequant"]

    for y in (case.owner["expected.y"], weight.get_linear(case.bias)(case.x)):
        assert y.shape == case.owner["expected.y"].shape
        assert bool((distance(y, x, weight.dequantize(), case.bias) <= 1).all())
