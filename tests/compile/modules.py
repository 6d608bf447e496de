"""Layers of every format through Inductor, torch's own compiler: `nox -s compile`."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters

from qload import copy_into
from qload.formats import FORMATS, MXFP4ExpertsWeight, UnquantizedWeight
from qload.kernel_formats import repack
from qload.kernels import KERNELS, Linear, MPLinearKernel
from qload.spec import Weight
from qload.testing import Traits, assert_same_bits, layer_of, layers
from tests.experts import test_module_whole
from tests.format_cases import CONFIGS
from tests.kernels.activation_cases import named
from tests.kernels.mp_layers import Case
from tests.methods.engine import awq, load, ready
from tests.methods.test_awq_marlin_method import created

pytestmark = pytest.mark.filterwarnings("ignore")  # of what torch itself imports and generates

MATRICES = [weight_type for weight_type in FORMATS if weight_type is not MXFP4ExpertsWeight]
ONCE = settings(max_examples=1, derandomize=True, phases=(Phase.generate,))
LAYOUTS = ("gptq", "marlin", "strips", "panels", "exllama")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(of: Callable[..., Any]) -> Any:
    """By Inductor, whole, for any number of tokens."""
    return torch.compile(of, fullgraph=True, dynamic=True)


def inputs(M: int, K: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(dtype)


def gptq(K: int, N: int, name: str = "", layout: str = "gptq") -> Any:
    """Random words, groups of 64."""
    layer = layer_of(Traits("gptq", 4, 64, symmetric=False, zeros="v2"), N, K, filling="noise")
    layer.tensors["scales"] *= 0.02
    weight = layer.weight()
    named = replace(weight, layer=replace(weight.layer, name=name))
    return named if layout == "gptq" else repack(named, layout)


@pytest.mark.parametrize("weight_type", MATRICES, ids=lambda weight_type: weight_type.format)
@ONCE
@given(data=st.data())
def test_a_layer_of_every_format_is_one_graph(weight_type: type[Weight], data: Any) -> None:
    torch._dynamo.reset()
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], most=2)).weight()
    module = weight.get_linear(bias=torch.ones(weight.layer.N), activations="unquantized")
    call = compiled(module)

    for M in (2, 5, 9):
        for dtype in (torch.float32, torch.bfloat16):
            x = inputs(M, weight.layer.K, dtype)
            assert_same_bits(call(x), module(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_of_two_shapes_are_two_graphs_whatever_their_names(layout: str) -> None:
    modules = [gptq(128, 64 * (1 + i % 2), f"layers.{i}", layout).get_linear() for i in range(32)]
    x = inputs(5, 128)
    for module in modules:
        want = module(x)
        module.compile(fullgraph=True, dynamic=True)
        assert_same_bits(module(x), want)

    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_around_layers_is_one_graph(layout: str) -> None:
    model = nn.Sequential(
        gptq(128, 256, "a", layout).get_linear(), nn.SiLU(), gptq(256, 64, "b", layout).get_linear()
    )
    call = compiled(model)

    for M in (3, 8, 13):
        x = inputs(M, 128)
        assert_same_bits(call(x), model(x))


@pytest.mark.parametrize("name", ["w8a8_int8_token_dynamic_sym", "fp8_tensor_static"])
def test_inputs_are_quantized_in_a_graph_as_eagerly(name: str) -> None:
    case = named(name)
    module = case.weight.get_linear(case.bias)

    assert_same_bits(compiled(module)(case.x), module(case.x))


def test_a_function_that_ranks_share_stays_eager_and_says_so() -> None:
    case = named("w8a8_int8_token_dynamic_sym")
    module = case.weight.get_linear(maximum=lambda largest: largest)
    want = module(case.x)

    assert_same_bits(torch.compile(module)(case.x), want)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a function finds the largest input"):
        compiled(module)(case.x)


def test_gradients_pass_through_a_frozen_weight_to_adapters() -> None:
    weight = gptq(128, 64)
    w = weight.dequantize()
    adapter = nn.Linear(128, 128, bias=False)
    bias = torch.zeros(64, requires_grad=True)
    module = Linear(weight, bias)
    g, x = inputs(5, 64, torch.float32), inputs(5, 128, torch.float32)
    found = []
    for call in (lambda x: module(adapter(x)), compiled(lambda x: module(adapter(x)))):
        for leaf in (adapter.weight, bias):
            leaf.grad = None
        call(x).backward(g)
        found.append((adapter.weight.grad, bias.grad))

    wanted = (g.double() @ w.double()).T @ x.double()
    for of_adapter, of_bias in found:
        assert of_adapter is not None
        assert bool(((of_adapter - wanted).abs() <= 200 * 2.0**-24 * _size(g, w, x)).all())
        assert torch.equal(of_bias, g.sum(0))


def _size(g: Tensor, w: Tensor, x: Tensor) -> Tensor:
    return (g.abs().double() @ w.abs().double()).T @ x.abs().double()


@pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.name)
def test_kernels_of_engines_are_one_graph(kind: type[MPLinearKernel]) -> None:
    case = Case(group=64)
    layer = case.layer(case.weight())
    kernel = kind(case.config, "qweight", "scales", None, None)
    kernel.process_weights_after_loading(layer)
    call = compiled(lambda x: kernel.apply_weights(layer, x))

    for M in (2, 7):
        x = inputs(M, case.K)
        if kind.name == "exllama":  # eagerly it asks for scratch space
            want = kernel.typed(layer).get_linear()(x)  # type: ignore[attr-defined]
        else:
            want = kernel.apply_weights(layer, x)
        assert_same_bits(call(x), want)


def test_methods_of_engines_are_one_graph() -> None:
    weight = awq(128, 64, 32)
    layer = created(weight)
    load(layer, weight.fields())
    ready(layer)
    method, call = layer.quant_method, compiled(lambda x: layer.quant_method.apply(layer, x))

    for M in (2, 7):
        x = inputs(M, 128)
        assert_same_bits(call(x), method.apply(layer, x))


@pytest.mark.parametrize("format", ["plain", "gptq", "panels", "mxfp4"])
def test_experts_are_one_graph(format: str) -> None:
    weight = test_module_whole.made(format)
    module = weight.get_linear()
    call = compiled(module)
    for tokens in (2, 5):
        read = test_module_whole.drawn(weight, tokens)
        assert_same_bits(call(*read), module(*read))

    assert counters["stats"]["unique_graphs"] == 1


def test_experts_that_pass_gradients_on_break_a_graph_and_say_so() -> None:
    weight = test_module_whole.made("plain")
    x, ids, weights = test_module_whole.drawn(weight)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="gradients of experts"):
        compiled(weight.get_linear())(x.requires_grad_(), ids, weights)


def test_a_plain_layer_is_torchs_own_product() -> None:
    module = UnquantizedWeight(weight=torch.randn(64, 32)).get_linear()
    x = inputs(3, 32, torch.float32)

    assert_same_bits(compiled(module)(x), compiled(nn.functional.linear)(x, module.get_buffer("weight")))


def test_what_is_copied_into_a_layer_is_what_its_graph_reads() -> None:
    module, other = Linear(gptq(128, 64)), gptq(128, 64)
    other = other.holding({"qweight": ~other.qweight})
    call, x = compiled(module), inputs(3, 128)
    call(x)

    copy_into(module, other)

    assert_same_bits(call(x), other.get_linear()(x))


def test_a_copy_of_a_compiled_layer_is_no_new_graph() -> None:
    module, x = gptq(128, 64).get_linear(), inputs(3, 128)
    call = compiled(lambda module, x: module(x))
    want = call(module, x)

    assert_same_bits(call(copy.deepcopy(module), x), want)
    assert counters["stats"]["unique_graphs"] == 1
