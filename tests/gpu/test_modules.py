"""Modules of typed weights on a device, as a model holds them: eager, traced, captured, moved, replaced."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from qload import Linear, copy_into
from qload.formats import UnquantizedWeight
from qload.kernels.cuda import linear
from qload.spec import Weight
from qload.testing import assert_same_bits
from tests.gpu import exllama_layers
from tests.gpu.layers import inputs, layer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of what torch generates and imports
LAYOUTS = pytest.mark.parametrize("layout", ["marlin", "strips", "exllama"])


def made(layout: str, N: int = 320, bits: int = 4, act_order: bool = False) -> Weight:
    if layout == "exllama":
        return exllama_layers.layer(1024, N, 128, bits)
    return layer(1024, N, 128, True, bits=bits, layout=layout, act_order=act_order)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@LAYOUTS
def test_inductor_compiles_a_module_as_one_graph_of_any_number_of_tokens(layout: str, mode: Any) -> None:
    weight = made(layout)
    module = weight.get_linear()
    compiled = torch.compile(module, fullgraph=True, dynamic=mode is None, mode=mode)

    with torch.no_grad():
        for M in (1, 33, 300):
            x = inputs(M, weight, torch.float16)
            for _ in range(3):  # recorded, and then replayed
                assert_same_bits(compiled(x).clone(), module(x))


def test_a_plain_module_is_torchs_own_product_traced_too() -> None:
    weight = UnquantizedWeight(weight=torch.randn(320, 1024, device="cuda").bfloat16())
    module, x = weight.get_linear(), torch.randn(7, 1024, device="cuda").bfloat16()
    want = nn.functional.linear(x, weight.weight)

    assert_same_bits(module(x), want)
    assert_same_bits(torch.compile(module, fullgraph=True)(x), want)


@LAYOUTS
def test_layers_of_two_shapes_are_two_graphs(layout: str) -> None:
    modules = [made(layout, N).get_linear() for N in (320, 640)] * 8
    x = torch.randn(5, 1024, device="cuda").half()
    with torch.no_grad():
        for module in modules:
            module.compile(fullgraph=True, dynamic=True)
            module(x)

    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act order"])
@pytest.mark.parametrize("layout", ["marlin", "strips"])
def test_a_planned_call_has_the_bits_of_one_that_is_decided_anew(
    layout: str, act_order: bool, bits: int
) -> None:
    weight = made(layout, 328, bits, act_order)
    bias = torch.randn(328, device="cuda").half()
    modules: list[tuple[Any, torch.Tensor | None]] = [
        (weight.get_linear(), None),
        (weight.get_linear(bias), bias),
    ]
    for module, held in modules:
        weight = module.typed  # in strips where these are faster than Marlin's order
        for M in (0, 1, 8, 16, 17, 24, 25, 64, 65, 256, 257, 1024):
            x = inputs(M, weight, torch.float16)
            for _ in range(2):
                assert_same_bits(module(x), linear(x, weight, held))
            assert_same_bits(module(x[:, None].expand(M, 3, 1024)[:, 1]), linear(x, weight, held))
        odd = torch.empty(1025, device="cuda", dtype=torch.float16)[1:].copy_(inputs(1, weight, x.dtype)[0])
        assert_same_bits(module(odd)[None], linear(odd[None].clone(), weight, held))


def test_tensors_that_were_put_elsewhere_are_read_there() -> None:
    weight, other = made("strips"), made("strips").to("cuda")
    module, x = weight.get_linear(), inputs(3, weight, torch.float16)
    module(x)
    words = torch.randint_like(weight.fields()["qweight"], -(2**31), 2**31 - 1)

    module.load_state_dict({**module.state_dict(), "qweight": words}, assign=True)

    assert_same_bits(module(x), linear(x, other.holding({"qweight": words})))
    module.qweight.data = weight.fields()["qweight"].clone()
    assert_same_bits(module(x), linear(x, weight))


def test_a_captured_graph_reads_the_weight_that_was_copied_in() -> None:
    weight = made("strips")
    words = torch.randint_like(weight.fields()["qweight"], -(2**31), 2**31 - 1)
    other = weight.holding({"qweight": words, "scales": weight.fields()["scales"] / 2})
    module = Linear(weight.holding({k: v.clone() for k, v in weight.fields().items()}))
    x = inputs(3, weight, torch.float16)
    module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)

    copy_into(module, other)
    graph.replay()

    assert_same_bits(y, linear(x, other))


@LAYOUTS
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_reach_what_stands_before_a_frozen_weight(layout: str, compiled: bool) -> None:
    weight = made(layout)
    bias = torch.zeros(320, device="cuda", dtype=torch.float16, requires_grad=True)
    module = weight.get_linear(bias)
    x = inputs(5, weight, torch.float16).requires_grad_()
    g = torch.randn(5, 320, device="cuda").half()

    (torch.compile(module, fullgraph=True) if compiled else module)(x).backward(g)

    assert x.grad is not None
    assert bias.grad is not None
    want, size = (
        a.double() @ b.double() for a, b in ((g, weight.dequantize()), (g.abs(), weight.dequantize().abs()))
    )
    unit = torch.finfo(torch.float16).eps
    assert bool(((x.grad.double() - want).abs() <= (unit + 320 * 2.0**-24) * size + unit * want.abs()).all())
    assert_same_bits(bias.grad, g.sum(0, dtype=torch.float32).half())


def test_the_operator_keeps_what_it_promises() -> None:
    module = Linear(made("strips"))
    x = torch.randn(3, 1024, device="cuda").half()
    held = [module.get_buffer(name) for name in module._call.names]

    torch.library.opcheck(torch.ops.qload.linear.default, (x, held, None, module._key, 320))
    with_gradients = torch.ops.qload.linear_with_gradients.default
    torch.library.opcheck(with_gradients, (x.requires_grad_(), held, None, module._key, 320))
