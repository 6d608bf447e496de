"""A module follows its tensors: what is written to them, put in their place, or asked of them by autocast."""

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload import Fp8Config, Fp8Weight, UnquantizedWeight, copy_into, layers, maximum_over, open_checkpoint
from qload.errors import ArgumentError
from qload.kernels import DequantizeLinearKernel, ExllamaLinearKernel, warm_up
from qload.kernels.linear import Linear
from qload.parallel import Rank
from qload.testing import assert_same_bits
from tests.kernels.mp_layers import Case
from tests.paths import FIXTURES

pytestmark = pytest.mark.usefixtures("seen_texts")

WORDS = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
X = torch.full((1, 64), 1e-3).half()
HUGE = 1e5  # a scale with which no number of WORDS is finite in float16


def layer(scale: float) -> Linear:
    made = Fp8Weight(
        config=Fp8Config(per="tensor"), weight=WORDS.clone(), weight_scale=torch.tensor([scale])
    ).get_linear()
    assert isinstance(made, Linear)
    return made


def fresh(scale: float) -> Tensor:
    gc.collect(1)  # what the last call made and left, which is young
    made: Tensor = layer(scale)(X)
    assert made.isfinite().all()
    return made


def test_scales_that_float16_cannot_carry_are_seen_in_inference_mode() -> None:
    with torch.inference_mode():
        module = layer(1.0)
        module(X)
        copy_into(module, layer(HUGE).typed)

        assert_same_bits(module(X), fresh(HUGE))


def test_scales_are_seen_anew_where_memory_is_used_again() -> None:
    module = layer(1.0)
    for turn in range(40):
        scale = HUGE if turn % 2 else 1.0
        module.weight_scale = torch.tensor([scale])
        assert_same_bits(module(X), fresh(scale))


def test_views_of_one_tensor_are_looked_at_each() -> None:
    scales, config = torch.ones(64), Fp8Config(per="channel")
    scales[32:] = HUGE
    Fp8Weight(config=config, weight=WORDS[:32], weight_scale=scales[:32]).get_linear()(X)

    y = Fp8Weight(config=config, weight=WORDS, weight_scale=scales).get_linear()(X)

    assert y.isfinite().all()


def prepared(kind: Any, scale_type: torch.dtype = torch.float16) -> tuple[Any, nn.Module]:
    case = Case(bits=4)
    module = case.layer(case.weight())
    module.scales.data = module.scales.data.to(scale_type)
    kernel = kind(replace(case.config, scale_type=scale_type), "qweight", "scales")
    kernel.process_weights_after_loading(module)
    return kernel, module


def test_what_is_written_into_a_kernels_parameters_is_seen() -> None:
    kernel, module = prepared(DequantizeLinearKernel, torch.bfloat16)
    x = torch.full((1, 256), 1e-3).half()
    kernel.apply_weights(module, x)

    with torch.no_grad():
        module.scales.copy_(2.0**14)

    assert kernel.apply_weights(module, x).isfinite().all()


def test_autocast_rounds_nothing_that_float16_cannot_carry() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        y = layer(HUGE)(X)

    assert_same_bits(y, fresh(HUGE))


def test_gradients_come_through_scratch_space_too() -> None:
    kernel, module = prepared(ExllamaLinearKernel)
    warm_up(module, 4)
    x = torch.ones(1, 256).half().requires_grad_()

    kernel.apply_weights(module, x).sum().backward()

    wide = kernel.typed(module).dequantize(torch.float16).float().sum(0)
    assert_same_bits(x.grad, wide.half()[None])


@pytest.mark.parametrize("name", ["w8a8_int8_token_dynamic_sym", "fp8_tensor_dynamic"])
def test_quantized_inputs_pass_gradients_on_whoever_finds_their_largest(name: str) -> None:
    with open_checkpoint(FIXTURES / "activations" / name, process_group=Rank(0, 2)) as weights:
        prefix = next(layer.prefix for layer in layers(weights) if not layer.plain)
        weight = weights.get_weights_row(prefix)
    gradients = []
    for maximum in ("own", maximum_over(Same())):
        x = torch.randn(3, weight.layer.K, generator=torch.Generator().manual_seed(1)).requires_grad_()
        weight.get_linear(maximum=maximum)(x).sum().backward()
        gradients.append(x.grad)

    assert_same_bits(*gradients)


class Same:
    """A group of two ranks that hold the same."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def maximum(self, tensor: Tensor) -> Tensor:
        return tensor


def test_a_compiled_plain_layer_refuses_a_bias_of_another_size() -> None:
    compiled = torch.compile(UnquantizedWeight(weight=torch.randn(8, 8)).get_linear(), backend="eager")
    for wrong in (torch.ones(1), torch.ones(3, 8)):
        with pytest.raises(Exception, match="bias"):
            compiled(torch.ones(3, 8), wrong)


def test_parameters_may_be_assigned() -> None:
    module, x = layer(1.0), X.float()
    module.bias = nn.Parameter(torch.ones(64))
    module.weight_scale = nn.Parameter(torch.tensor([2.0]))

    assert [name for name, _ in module.named_parameters()] == ["bias"]
    assert_same_bits(module(x), layer(2.0)(x) + 1)
    assert_same_bits(copy.deepcopy(module)(x), module(x))
    del module.bias
    assert_same_bits(module(x), layer(2.0)(x))


def test_a_bias_that_was_converted_can_be_copied() -> None:
    bias = nn.Parameter(torch.ones(64))

    module = copy.deepcopy(layer(1.0).typed.get_linear(bias, dtype=torch.float16))

    assert module.bias.dtype == torch.float16


def test_nothing_takes_the_place_of_a_tensor() -> None:
    with pytest.raises(ArgumentError, match="weight: weight_scale\n  expected a tensor\n  got      NoneType"):
        layer(1.0).weight_scale = None


def test_a_refused_state_dict_changes_nothing() -> None:
    module, other = (
        layer(1.0),
        Fp8Weight(
            config=Fp8Config(per="channel"), weight=WORDS, weight_scale=torch.full((64,), 3.0)
        ).get_linear(),
    )
    before = module(X)

    with pytest.raises(ArgumentError, match="state dict"):
        module.load_state_dict(other.state_dict(), strict=False)

    assert_same_bits(module(X), before)
    with pytest.raises(AttributeError):
        module.activations = "unquantized"
