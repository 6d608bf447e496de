"""Inputs as the owners of their schemes quantize them: codes and scales bit for bit, y within a bound."""

from pathlib import Path

import pytest
import torch

from qload.kernels.activations import quantize
from qload.spec import ActivationScheme
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


def test_a_row_by_hand() -> None:
    """Absmax 127.5 makes the scale 1, so that codes are x, rounded half to even and saturated."""
    scheme = ActivationScheme("int", 8, True, "token")
    x = torch.tensor([[0.5, 1.5, -2.5, 127.5, -127.5, 0.0], [1.0, 2.0, 4.0, 8.0, 255.0, 6.0]])

    made = quantize(x, scheme)

    assert made.scales.tolist() == [[1], [2]]
    assert made.codes.tolist() == [[0, 2, -2, 127, -128, 0], [0, 1, 2, 4, 127, 3]]
    assert made.dequantize().tolist() == [[0, 2, -2, 127, -128, 0], [0, 2, 4, 8, 254, 6]]


def test_an_asymmetric_row_by_hand() -> None:
    """From -51 to 204 a step is 1 and zero is code -77; where no input is below 0 it is the least code."""
    scheme = ActivationScheme("int", 8, True, "token", symmetric=False)
    made = quantize(torch.tensor([[-51.0, 204.0, 0.0, 3.0], [510.0, 100.0, 2.0, 8.0]]), scheme)

    assert made.scales.tolist() == [[1], [2]]
    assert made.zero_points is not None
    assert made.zero_points.tolist() == [[-77], [-128]]
    assert made.codes.tolist() == [[-128, 127, -77, -74], [127, -78, -127, -124]]
    assert made.dequantize().tolist() == [[-51, 204, 0, 3], [510, 100, 2, 8]]


def test_powers_of_two_by_hand() -> None:
    """The largest e2m1 is 6, in [4, 8): 7 is 1.75 * 4 and doubles the scale, which 6.9 does not."""
    scheme = ActivationScheme("float", 4, True, "group", 2, scale_type="e8m0")
    made = quantize(torch.tensor([6.9, 5.0, 7.0, 5.0, 0.0, 0.0]), scheme)

    assert made.scales.tolist() == [1, 2, 2.0**-127]
    assert made.codes.tolist() == [6, 4, 4, 2, 0, 0]


@pytest.mark.parametrize(
    "scheme",
    [
        ActivationScheme("int", 8, True, "token"),
        ActivationScheme("int", 8, True, "tensor", symmetric=False),
        ActivationScheme("float", 8, True, "token", owner="fbgemm"),
        ActivationScheme("float", 8, True, "token", owner="modelopt"),
        ActivationScheme("float", 8, True, "group", 4, scale_type="e8m0", owner="modelopt"),
        ActivationScheme("float", 4, True, "group", 4, scale_type="e8m0"),
        ActivationScheme("float", 4, "local", "tensor_group", 4, scale="s", scale_type="e4m3"),
    ],
    ids=str,
)
def test_nothing_at_all_zeros_and_what_is_no_number(scheme: ActivationScheme) -> None:
    scale = torch.ones(1) if scheme.scale else None

    assert quantize(torch.empty(0, 8), scheme, scale).dequantize().shape == (0, 8)
    assert not quantize(torch.zeros(3, 8), scheme, scale).dequantize().any()
    tiny = quantize(torch.full((2, 8), 1e-44), scheme, scale).dequantize()
    assert bool((tiny.abs() <= 2e-44).all())
    x = torch.ones(2, 8)
    x[1, 2] = torch.nan
    assert quantize(x, scheme, scale).dequantize().isnan()[1, 2]


def test_a_stored_scale_passes_what_is_no_number_on() -> None:
    scheme = ActivationScheme("int", 8, False, "tensor", scale="input_scale")
    made = quantize(torch.tensor([torch.nan, 1.0, torch.inf]), scheme, torch.tensor([0.5]))

    assert made.dequantize().isnan().tolist() == [True, False, False]
    assert made.codes[1:].tolist() == [2, 127]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_inputs_are_quantized_as_the_numbers_that_they_are(dtype: torch.dtype) -> None:
    case = read(FOLDERS[0])
    x = case.x.to(dtype)
    narrow, wide = quantize(x, case.scheme), quantize(x.float(), case.scheme)

    assert torch.equal(narrow.codes, wide.codes)
    assert torch.equal(narrow.scales, wide.scales)
    assert case.weight.get_linear()(x).dtype == dtype


def test_wide_inputs_stay_wide() -> None:
    case = read(FOLDERS[0])
    made = quantize(case.x.double(), case.scheme)

    assert made.scales.dtype == made.codes.dtype == torch.float64
    assert torch.equal(made.codes.float(), case.owner["expected.x_codes"])
    assert case.weight.get_linear()(case.x.double()).dtype == torch.float64


@pytest.mark.parametrize("folder", [FOLDERS[0], FOLDERS[-1]], ids=lambda folder: folder.name)
def test_one_token_is_a_row_however_many_axes_there_are(folder: Path) -> None:
    case = read(folder)
    whole, (_, T, K) = quantize(case.x, case.scheme).dequantize(), case.x.shape
    assert case.scheme.strategy == "token"

    for shape in ((T, K), (T, 1, 1, K), (1, 1, T, K)):
        assert torch.equal(quantize(case.x.reshape(shape), case.scheme).dequantize(), whole.reshape(shape))
    assert torch.equal(quantize(case.x[0, 2], case.scheme).dequantize(), whole[0, 2])
