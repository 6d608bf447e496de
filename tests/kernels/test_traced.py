"""Modules in graphs that run as they are traced: the bits of eager calls, in one graph or with a reason."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from qload.formats import UnquantizedWeight
from qload.kernels import compile_support
from qload.spec import Weight
from qload.testing import Traits, assert_same_bits, layer_of
from tests.experts import test_module_whole
from tests.kernels.activation_cases import named

pytestmark = pytest.mark.filterwarnings("ignore")  # of what torch's compiler imports

K, N = 64, 96
WEIGHTS: dict[str, Callable[[], Weight]] = {
    "plain": lambda: UnquantizedWeight(weight=torch.linspace(-1, 1, N * K).reshape(N, K)),
    "gptq": lambda: layer_of(Traits("gptq", 4, 32, symmetric=False, zeros="v2"), N, K).weight(),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def traced(of: Callable[..., Any], *, whole: bool = True) -> Any:
    return torch.compile(of, backend="eager", fullgraph=whole, dynamic=True)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))


@pytest.mark.parametrize("bias", ["none", "own", "given"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_linear_is_one_graph_of_the_eager_bits(name: str, bias: str) -> None:
    own, given = (
        torch.arange(float(N)) + turn if bias == at else None for turn, at in enumerate(("own", "given"))
    )
    module = WEIGHTS[name]().get_linear(own)
    call = traced(module)

    for x in (inputs(2, K), inputs(5, K)):
        assert_same_bits(call(x, given), module(x, given))
    assert counters["stats"]["unique_graphs"] == 1
    rows = inputs(2, 3, K)
    assert_same_bits(call(rows, given), module(rows, given))


@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_pass_through_a_traced_linear(name: str) -> None:
    module, found = WEIGHTS[name]().get_linear(), list[Any]()
    for call in (module, traced(module)):
        x, bias = inputs(3, K).requires_grad_(), torch.zeros(N, requires_grad=True)
        call(x, bias).square().sum().backward()
        found.append((x.grad, bias.grad))

    assert_same_bits(found[0][0], found[1][0])
    assert_same_bits(found[0][1], found[1][1])


def test_a_maximum_of_ranks_is_found_outside_of_graphs() -> None:
    case = named("w8a8_int8_token_dynamic_sym")
    module = case.weight.get_linear(maximum=lambda largest: 2 * largest)

    assert_same_bits(traced(module, whole=False)(case.x), module(case.x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a function finds the largest input"):
        traced(module)(case.x)


@pytest.mark.parametrize("format", ["plain", "gptq"])
def test_experts_are_one_graph_without_gradients_and_eager_with_them(format: str) -> None:
    weight = test_module_whole.made(format)
    module = weight.get_linear()
    call = traced(module)
    for tokens in (2, 5):
        read = test_module_whole.drawn(weight, tokens)
        assert_same_bits(call(*read), module(*read))
    assert counters["stats"]["unique_graphs"] == 1

    x, ids, weights = read
    grads = list[Any]()
    for each in (module, traced(module, whole=False)):
        leaf = x.clone().requires_grad_()
        each(leaf, ids, weights).sum().backward()
        grads.append(leaf.grad)
    assert_same_bits(*grads)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="gradients of experts"):
        traced(module)(x.requires_grad_(), ids, weights)


def test_facts_of_a_layer_are_constants_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with a traced look-up checks it at each call; here a traced look-up breaks the graph."""
    module, x = WEIGHTS["gptq"]().get_linear(), inputs(2, K)
    monkeypatch.setattr(compile_support, "known", torch.compiler.disable(compile_support.known))

    assert_same_bits(traced(module)(x), module(x))
