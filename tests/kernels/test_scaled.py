"""Inputs that are quantized as a weight declares, times that weight: codes times codes, or what they mean."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.formats import CTIntConfig, CTIntWeight, Fp8Config, Fp8Weight
from qload.kernels import declared, plans, scaled
from qload.kernels.activations import quantize
from qload.spec import ActivationScheme, Layer, Weight
from tests.kernels.activation_cases import FOLDERS, read

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_case = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
TOKEN = ActivationScheme("int", 8, True, "token")


def assert_scheme(y: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    """Within what rounding inputs and weight, K sums, both scales and the result can cost."""
    __tracebackhide__ = True
    ((made, _),) = declared.quantized(x, weight, None)
    taken, w = made.dequantize().double(), weight.dequantize().double()
    exact, size = taken @ w.T, taken.abs() @ w.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    info, steps = torch.finfo(x.dtype), (x.shape[-1] + 6) * 2.0**-24
    budget = (info.eps * (1 + info.eps) + steps / (1 - steps)) * size + exact.abs() * info.eps + info.tiny
    assert y.dtype == x.dtype
    assert bool(((y.double() - exact).abs() <= budget).all())


@every_case
@every_dtype
@pytest.mark.parametrize("M", [0, 1, 8, 40])
def test_every_scheme_is_kept_in_every_type(folder: Any, dtype: torch.dtype, M: int) -> None:
    case = read(folder)
    weight = case.weight
    x = case.x.reshape(-1, weight.layer.K).repeat(40, 1)[:M].to(dtype)

    assert_scheme(plans.multiply(x, weight), x, weight)
    assert_scheme(plans.multiply(x, weight, case.bias), x, weight, case.bias)


def int8(N: int, K: int, scheme: ActivationScheme, zeros: bool = False) -> CTIntWeight:
    make = torch.Generator().manual_seed(N + K)
    codes = torch.randint(-128, 128, (N, K), generator=make, dtype=torch.int8)
    points = torch.randint(-128, 128, (N, 1), generator=make, dtype=torch.int8)
    return CTIntWeight(
        config=CTIntConfig((1, -1), symmetric=not zeros),
        weight=codes,
        weight_scale=torch.rand(N, 1, generator=make) + 0.5,
        weight_zero_point=points if zeros else None,
        layer=Layer((N,), K, (N, K), "up", None, scheme),
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("M", [1, 16, 31, 32, 33])
def test_sums_of_int8_are_exact_zero_points_included(M: int, symmetric: bool) -> None:
    weight = int8(48, 80, replace(TOKEN, symmetric=symmetric))
    x = torch.randn(M, 80, generator=torch.Generator().manual_seed(M)) + 3
    made = quantize(x, replace(TOKEN, symmetric=symmetric))
    assert (made.zero_points is None) == symmetric

    got = scaled.of_int8(made, weight.weight)

    exact = made.counted().long() @ weight.weight.long().T
    assert torch.equal(got.long(), exact)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_points_of_both_sides_are_counted(symmetric: bool) -> None:
    weight = int8(17, 33, replace(TOKEN, symmetric=symmetric), zeros=True)
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(5))

    assert_scheme(plans.multiply(x, weight), x, weight)


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("per", ["tensor", "parts", "channel"])
def test_scales_of_outputs_are_what_a_code_of_one_is_worth(per: Any, divide: bool) -> None:
    scales = {"tensor": [4.0], "parts": [2.0, 0.5], "channel": [0.25, 0.5, 1.0, 2.0, 4.0]}[per]
    axes = {"tensor": "P", "parts": "P", "channel": "N"}[per]
    weight = Fp8Weight(
        config=Fp8Config(per, axes=axes, divide=divide),
        weight=torch.ones(5, 16).to(torch.float8_e4m3fn),
        weight_scale=torch.tensor(scales),
        layer=Layer((2, 3) if per == "parts" else (5,), 16, (5, 16)),
    )

    column = scaled.column_scales(weight)

    assert column is not None
    assert torch.equal(column, weight.dequantize()[:, 0])


def test_blocks_and_groups_have_no_scale_of_an_output() -> None:
    blocks = Fp8Weight(
        config=Fp8Config("block", (2, 8)),
        weight=torch.ones(4, 16).to(torch.float8_e4m3fn),
        weight_scale=torch.ones(2, 2),
    )
    groups = replace(int8(4, 16, TOKEN), config=CTIntConfig((1, 8)), weight_scale=torch.ones(4, 2))

    assert scaled.column_scales(blocks) is None
    assert scaled.column_scales(groups) is None


@pytest.mark.parametrize("size", [2.0**-20, 1.0, 60000.0])
def test_inputs_of_any_size_survive_float16(size: float) -> None:
    """Groups, whose scales are multiplied out before the product."""
    scheme = ActivationScheme("float", 8, True, "group", 8, owner="transformers")
    weight = replace(int8(8, 32, scheme), weight_scale=torch.full((8, 1), 2.0**-12))
    x = (torch.rand(3, 32, generator=torch.Generator().manual_seed(1)) * size).half()
    x[1] = 0

    y = plans.multiply(x, weight)

    assert bool(y.isfinite().all())
    assert_scheme(y, x, weight)


def test_gradients_pass_through_what_inputs_became() -> None:
    weight = int8(8, 32, TOKEN)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
    bias = torch.zeros(8, requires_grad=True)

    y = plans.multiply(x, weight, bias)
    y.sum().backward()  # type: ignore[no-untyped-call]

    assert_scheme(y.detach(), x.detach(), weight)
    assert bias.grad is not None
    assert bias.grad.tolist() == [3.0] * 8
    assert x.grad is not None


def test_inputs_on_another_device_have_no_kernel_of_a_cpu() -> None:
    inputs: Any = SimpleNamespace(x=torch.empty(2, 64, device="meta"))

    assert scaled._by_a_kernel(inputs, int8(64, 64, TOKEN), None) is None
