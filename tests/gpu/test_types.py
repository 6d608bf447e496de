"""Modules made for a type of activations, on a device: which have a kernel, and what they multiply."""

import logging
from typing import Any

import pytest
import torch

from qload.kernel_formats import repack
from qload.kernels import cuda
from qload.spec import Weight
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.gpu import exllama_layers
from tests.gpu.layers import inputs, layer
from tests.kernels.mp_layers import Case

pytestmark = pytest.mark.gpu
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
LAYOUTS = pytest.mark.parametrize("layout", ["marlin", "strips", "exllama"])
ORDERS = pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act order"])
MANY = pytest.mark.parametrize("M", [1, 8, 17, 64, 300, 1024])


def made(layout: str, act_order: bool, dtype: torch.dtype = HALF, exact: bool = False) -> Weight:
    if layout == "exllama":
        return exllama_layers.layer(1152, 320, 128, 4, dtype, act_order=act_order, exact=exact)
    return layer(1152, 320, 128, True, act_order, dtype, exact=exact, layout=layout)


@LAYOUTS
@ORDERS
@MANY
@pytest.mark.parametrize(
    ("scales", "dtype"), [(HALF, BRAIN), (BRAIN, HALF), (FULL, HALF), (FULL, BRAIN)], ids=str
)
def test_scales_of_another_type_are_converted_once_and_a_kernel_multiplies(
    layout: str, act_order: bool, M: int, scales: torch.dtype, dtype: torch.dtype, caplog: Any
) -> None:
    weight = made(layout, act_order, scales)
    module: Any = weight.get_linear(torch.ones(320, device="cuda"), dtype=dtype)
    x = inputs(M, weight, dtype)

    assert cuda.can_multiply(x, module.typed, module.bias)
    with caplog.at_level(logging.WARNING, logger="qload"):
        y = module(x)
    assert_same_bits(y, cuda.linear(x, module.typed, module.bias))
    assert not caplog.records
    plain: Any = weight.get_linear(dtype=dtype)
    assert_within_bound(plain, plain.typed, x)


@LAYOUTS
@ORDERS
def test_a_call_that_no_kernel_takes_is_told_once_and_right(
    layout: str, act_order: bool, caplog: Any
) -> None:
    weight = made(layout, act_order)
    module: Any = weight.get_linear()

    for dtype in (BRAIN, FULL, BRAIN):
        assert_within_bound(module, weight, inputs(3, weight, dtype))

    said = [record.getMessage() for record in caplog.records if record.name == "qload"]
    assert len(said) == 1
    assert "get_linear(dtype=torch.bfloat16)" in said[0]


@pytest.mark.parametrize("layout", ["marlin", "strips"])
@ORDERS
@MANY
@pytest.mark.parametrize("group", [96, 192, 256, 512])
def test_groups_that_are_cut_are_multiplied_by_the_same_kernels(
    layout: str, act_order: bool, M: int, group: int
) -> None:
    case = Case(group=group, K=1152, N=192, act_order=act_order)
    weight = repack(case.weight(), layout).to("cuda")
    exact = repack(case.weight(scale=1.0), layout).to("cuda")

    assert cuda.why_not_linear(weight, HALF) is None
    assert_reads_back(weight.get_linear(), weight, HALF)
    assert_sums_exactly(exact.get_linear(), exact, HALF, M=M)


def test_a_module_that_moves_to_the_device_is_the_same() -> None:
    weight = made("exllama", act_order=False)

    module: Any = weight.to("cpu").get_linear().to("cuda")

    assert module.typed.config == weight.config
    x = inputs(5, weight, HALF)
    assert_same_bits(module(x), weight.get_linear()(x))


def test_an_index_handed_to_a_weight_is_read_by_every_kernel() -> None:
    even = exllama_layers.layer(1152, 320, 128, 4, exact=True)
    index = torch.randint(9, (1152,), device="cuda", dtype=torch.int32)
    other = even.holding({"g_idx": index})

    for M in (1, 33, 300):
        assert_sums_exactly(other.get_linear(), other, HALF, M=M)
    assert not torch.equal(other.dequantize(), even.dequantize())
