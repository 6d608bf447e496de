"""Plans that a linear keeps: none is used for other views of the same memory, or without gradients."""

import torch
from torch import Tensor

from qload import Fp8Config, Fp8Weight, Linear
from qload.testing import assert_same_bits

N = 256


def layer() -> Linear:
    made = torch.Generator().manual_seed(0)
    codes = torch.randn(N, N, generator=made).to(torch.float8_e4m3fn)
    scales = torch.rand(N, generator=made) + 0.5
    return Linear(Fp8Weight(config=Fp8Config(), weight=codes, weight_scale=scales))


def drawn_inputs() -> Tensor:
    return torch.randn(2, N, generator=torch.Generator().manual_seed(1))


def test_a_view_with_other_strides_gets_a_plan_of_its_own() -> None:
    linear, x = layer(), drawn_inputs()
    linear(x)
    turned = linear.weight.t()
    fresh = Linear(Fp8Weight(config=Fp8Config(), weight=turned, weight_scale=linear.weight_scale))

    y = torch.func.functional_call(linear, {"weight": turned}, (x,))

    assert_same_bits(y, fresh(x))
    assert not torch.equal(y, linear(x))


def test_a_scale_that_wants_its_gradient_gets_it_after_a_call_without() -> None:
    linear, x = layer(), drawn_inputs()
    with torch.no_grad():
        before = linear(x)
    linear.weight_scale.requires_grad_(True)

    linear(x).sum().backward()

    assert linear.weight_scale.grad is not None
    linear.weight_scale.requires_grad_(False)
    with torch.no_grad():
        assert_same_bits(linear(x), before)
