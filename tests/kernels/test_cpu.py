"""Which calls the CPU module takes, and that all doors lead to it; tests/native has its results."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.kernel_formats import repack
from qload.kernels import cpu, products
from qload.native.modules import NativeModule
from qload.testing import assert_same_bits
from tests.kernel_formats.marlin_layers import layer

WEIGHT: Any = repack(layer(64, 32, 32, sym=False), "panels")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A module that multiplies as torch does, and how many tokens each of its calls had."""
    seen: list[int] = []

    def multiply(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        seen.append(x.numel() // weight.shape[1])
        made = products.multiply(x.detach().reshape(-1, weight.shape[1]), weight, bias)
        return made.reshape(*x.shape[:-1], weight.shape[0])

    monkeypatch.setattr(cpu, "load", lambda name: NativeModule(cpu))
    monkeypatch.setattr(cpu, "linear", multiply)
    return seen


def inputs(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, 64, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_a_module_calls_it_with_or_without_a_bias(here: list[int]) -> None:
    for bias in (None, torch.ones(32), torch.ones(32).half()):
        assert WEIGHT.get_linear(bias=bias)(inputs(2, 3)).shape == (2, 3, 32)

    assert here == [6, 6, 6]


def test_the_operator_calls_it_too(here: list[int]) -> None:
    module, x = WEIGHT.get_linear(), inputs(3)
    held = [WEIGHT.fields()[name] for name in module._call.names]

    y = torch.ops.qload.linear(x, held, None, module._meaning, 32)

    assert here == [3]
    assert_same_bits(y, module(x))


def test_gradients_are_those_of_the_weight(here: list[int]) -> None:
    x = inputs(2, dtype=torch.float32).requires_grad_()

    WEIGHT.get_linear()(x).sum().backward()

    assert x.grad is not None
    torch.testing.assert_close(x.grad, WEIGHT.dequantize().sum(0).expand(2, 64))


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        pytest.param(inputs(2, dtype=torch.float64), WEIGHT, None, id="float64"),
        pytest.param(inputs(2).requires_grad_(), WEIGHT, None, id="gradients of x"),
        pytest.param(inputs(2), WEIGHT, torch.ones(32).requires_grad_(), id="gradients of a bias"),
        pytest.param(inputs(2), layer(64, 32, 32), None, id="another order"),
        pytest.param(
            inputs(2),
            WEIGHT.holding({"scales": WEIGHT.scales.repeat_interleave(2, 1)[:, ::2]}),
            None,
            id="scales apart",
        ),
        pytest.param(inputs(2).to("meta"), WEIGHT.to("meta"), None, id="no memory"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_it_does_not_take(x: Tensor, weight: Any, bias: Tensor | None) -> None:
    assert not cpu.can_multiply(x, weight, bias)


@pytest.mark.usefixtures("here")
def test_it_takes_the_types_of_activations_and_not_within_the_reference() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert cpu.can_multiply(inputs(2, dtype=dtype), WEIGHT, torch.ones(32))
    with native.reference():
        assert not cpu.can_multiply(inputs(2), WEIGHT, None)


def test_every_no_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load", lambda name: NativeModule(cpu))
    empty = WEIGHT.holding({})
    object.__setattr__(empty, "layer", type(WEIGHT.layer)((0,), 64, (0, 64)))

    assert cpu.why_not(WEIGHT, torch.float16) is None
    assert (
        cpu.why_not(WEIGHT, torch.float64) == "needs activations of float32, float16 or bfloat16, got float64"
    )
    assert cpu.why_not(layer(64, 32, 32), torch.float16) == "no CPU kernel reads GPTQWeight"
    assert cpu.why_not(empty, torch.float16) == "a weight of shape (0, 64) has no elements"
    monkeypatch.setattr(cpu, "load", lambda name: NativeModule(None, "not built"))
    assert cpu.why_not(WEIGHT, torch.float16) == "the CPU module is not built"


def test_without_the_module_a_weight_in_panels_is_multiplied_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "load", lambda name: NativeModule(None, "not built"))
    x = inputs(3, dtype=torch.float32)

    assert_same_bits(WEIGHT.get_linear()(x), products.multiply(x, WEIGHT))
