"""17 tokens and more on Marlin's order: read-back, exact sums, a derived bound."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.kernel_formats import GPTQMarlinWeight
from qload.kernels import cuda
from qload.kernels.cuda import launch, linear, marlin, middle
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.gpu.layers import DTYPES, call, inputs, layer

pytestmark = pytest.mark.gpu
BITS = pytest.mark.parametrize("bits", [4, 8])
TOKENS = [1, 9, 16, 17, 24, 31, 32, 33, 63, 64, 65, 100, 128, 256]
LAYERS = [  # K, N, group, zero points, act order, bits
    pytest.param(128, 64, 128, False, False, 4, id="one tile"),
    pytest.param(1024, 256, 128, False, False, 4, id="groups of 128"),
    pytest.param(1024, 576, 64, True, False, 4, id="groups of 64 with zero points"),
    pytest.param(960, 192, 32, True, False, 4, id="groups of 32 with zero points"),
    pytest.param(960, 320, 32, False, False, 4, id="groups of 32"),
    pytest.param(1984, 128, -1, False, False, 4, id="one scale a column"),
    pytest.param(768, 128, -1, True, False, 4, id="one scale and zero point a column"),
    pytest.param(1024, 320, 128, True, True, 4, id="act order"),
    pytest.param(416, 72, 32, True, True, 4, id="padded act order"),
    pytest.param(1024, 256, 128, False, False, 8, id="8 bits, groups of 128"),
    pytest.param(960, 192, 32, True, False, 8, id="8 bits, groups of 32 with zero points"),
    pytest.param(768, 640, -1, False, False, 8, id="8 bits, one scale a column"),
]


@pytest.fixture(autouse=True, scope="module")
def _hopper() -> None:
    reason = cuda.why_not()
    if reason or torch.cuda.get_device_capability()[0] != launch.HOPPER:
        pytest.skip(reason or "needs Hopper")


def kernel(weight: GPTQMarlinWeight, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x, weight, bias, kernel="middle")


@DTYPES
@pytest.mark.parametrize("M", [32, 64, 128])
@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order", "bits"), LAYERS)
def test_one_input_at_a_time_reads_the_weight_back(
    K: int, N: int, group: int, zeros: bool, act_order: bool, bits: int, M: int, dtype: Any
) -> None:
    weight = layer(K, N, group, zeros, act_order, dtype, bits=bits)

    def in_pieces(x: Tensor) -> Tensor:
        wide = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % M))
        return torch.cat([kernel(weight)(each) for each in wide.split(M)])[: x.shape[0]]

    assert_reads_back(in_pieces, weight, dtype)


@DTYPES
@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order", "bits"), LAYERS)
def test_sums_are_exact_where_they_can_be_and_within_what_rounding_costs(
    K: int, N: int, group: int, zeros: bool, act_order: bool, bits: int, M: int, dtype: Any
) -> None:
    exact = layer(K, N, group, zeros, act_order, dtype, exact=True, bits=bits)
    rounded = layer(K, N, group, zeros, act_order, dtype, bits=bits)

    assert_sums_exactly(kernel(exact), exact, dtype, M=M)
    assert_within_bound(kernel(rounded), rounded, inputs(M, rounded, dtype))


@DTYPES
@BITS
@pytest.mark.parametrize(("columns", "together"), [(256, 1), (256, 2), (512, 1)])
@pytest.mark.parametrize("split", range(1, 9))
@pytest.mark.parametrize("M", [30, 64, 128, 200])
@pytest.mark.parametrize("group", [32, 128])
def test_every_division_of_a_layer_sums_exactly(
    columns: int, together: int, split: int, M: int, group: int, bits: int, dtype: torch.dtype
) -> None:
    weight = layer(1984, 832, group, True, False, dtype, exact=True, bits=bits)

    def divided(x: Tensor) -> Tensor:
        return middle.run(call(x, weight), columns, split, together)

    assert_sums_exactly(divided, weight, dtype, M=M)


@BITS
@pytest.mark.parametrize(("K", "N"), [(64, 64), (128, 4096), (28672, 128), (4096, 64 * 700)])
@pytest.mark.parametrize("M", [32, 64, 256])
def test_the_division_that_is_chosen_sums_exactly(K: int, N: int, M: int, bits: int) -> None:
    weight = layer(K, N, -1, False, False, torch.float16, exact=True, bits=bits)

    assert_sums_exactly(kernel(weight), weight, torch.float16, M=M)


@DTYPES
@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("M", [17, 64, 128])
def test_a_bias_is_added_before_the_one_rounding(M: int, split: int, dtype: torch.dtype) -> None:
    weight = layer(1024, 256, 128, True, False, dtype, exact=True, bits=8)
    x, bias = inputs(M, weight, dtype).round(), torch.arange(256, device="cuda").to(dtype) / 8

    got = middle.run(replace(call(x, weight), bias=bias), 0, split)

    wide = x.double() @ weight.dequantize().double().T + bias.double()
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_what_does_not_fit_is_refused_with_a_reason() -> None:
    weight = layer(128, 64, 128, False, False, torch.float16)
    few, many = (call(inputs(M, weight, torch.float16), weight) for M in (20, 257))
    memory = torch.empty(weight.qweight.numel() + 1, dtype=torch.int32, device="cuda")
    moved = memory[1:].view(weight.qweight.shape)

    assert "takes at most 256 tokens, got 257" in str(middle.why_not(many))
    assert middle.why_not(few) is None
    assert "multiples of 16 bytes" in str(middle.why_not(replace(few, weights=moved)))


@pytest.mark.parametrize("M", [33, 65])
def test_a_compiled_model_calls_it_whole(M: int) -> None:
    weight = layer(1024, 256, 128, True, False, torch.float16, bits=8)
    x = inputs(M, weight, torch.float16)

    torch.library.opcheck(torch.ops.qload.marlin.default, marlin.arguments(x, weight), {"asked": "middle"})
    compiled = torch.compile(lambda x: kernel(weight)(x) * 2, fullgraph=True, backend="eager")
    assert_same_bits(compiled(x), kernel(weight)(x) * 2)
