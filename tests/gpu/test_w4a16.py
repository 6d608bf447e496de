"""The 4-bit linear on Marlin's order: read-back, exact sums, a derived bound, the same bits every time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernel_formats import GPTQMarlinWeight
from qload.kernels import cuda
from qload.kernels.cuda import marlin, w4a16
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.gpu.layers import DTYPES, divided, inputs, layer

pytestmark = pytest.mark.gpu
TOKENS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64]
LAYERS = [  # K, N, group, zero points, act order
    pytest.param(128, 64, 128, False, False, id="one tile"),
    pytest.param(1024, 256, 128, False, False, id="groups of 128"),
    pytest.param(1024, 256, 64, True, False, id="groups of 64 with zero points"),
    pytest.param(960, 192, 32, True, False, id="groups of 32 with zero points"),
    pytest.param(1984, 128, -1, False, False, id="one scale a column"),
    pytest.param(768, 128, -1, True, False, id="one scale and zero point a column"),
    pytest.param(1024, 320, 128, True, True, id="act order"),
    pytest.param(416, 72, 32, True, True, id="padded act order"),
    pytest.param(4416, 1088, 32, False, False, id="K of several phases"),
]


def kernel(weight: GPTQMarlinWeight, bias: Tensor | None = None) -> Any:
    return lambda x: marlin.linear(x, weight, bias, kernel="w4a16")


@DTYPES
@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order"), LAYERS)
def test_one_input_at_a_time_reads_the_weight_back(
    K: int, N: int, group: int, zeros: bool, act_order: bool, dtype: torch.dtype
) -> None:
    weight = layer(K, N, group, zeros, act_order, dtype)

    def in_pieces(x: Tensor) -> Tensor:  # the kernel of few tokens, then that of many
        return torch.cat([kernel(weight)(each) for each in (*x[:16].split(8), *x[16:].split(64))])

    assert_reads_back(in_pieces, weight, dtype)


@DTYPES
@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order"), LAYERS)
def test_sums_are_exact_where_they_can_be(
    K: int, N: int, group: int, zeros: bool, act_order: bool, M: int, dtype: torch.dtype
) -> None:
    weight = layer(K, N, group, zeros, act_order, dtype, exact=True)

    assert_sums_exactly(kernel(weight), weight, dtype, M=M)


@DTYPES
@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order"), LAYERS)
def test_sums_are_within_what_rounding_costs(
    K: int, N: int, group: int, zeros: bool, act_order: bool, M: int, dtype: torch.dtype
) -> None:
    weight = layer(K, N, group, zeros, act_order, dtype)

    assert_within_bound(kernel(weight), weight, inputs(M, weight, dtype))


@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize("split", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("M", [5, 16, 30, 64])
def test_every_division_of_a_layer_sums_exactly(columns: int, split: int, M: int) -> None:
    if split > 1 and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs clusters")
    if split > 1 and columns * M > 128:
        pytest.skip("the sums of so many tokens and columns do not fit a block")
    if 64 * columns * M % split:
        pytest.skip("blocks that share K share out the sums evenly")
    w = layer(2048, 512, 128, True, False, torch.float16, exact=True)

    assert_sums_exactly(divided(w4a16.run, w, columns, split), w, torch.float16, M=M)


@pytest.mark.parametrize("M", [1, 8, 16, 64])
def test_blocks_that_take_several_tiles_in_turns_sum_exactly(M: int) -> None:
    w = layer(1024, 64 * 700, 128, True, False, torch.float16, exact=True)
    for columns, split in ((1, 1), (1, 2), (2, 2), (4, 1), (0, 0)):
        assert_sums_exactly(divided(w4a16.run, w, columns, split), w, torch.float16, M=M)


@DTYPES
@pytest.mark.parametrize("M", [1, 16, 64])
def test_a_bias_is_added_before_the_one_rounding(M: int, dtype: torch.dtype) -> None:
    weight = layer(1024, 256, 128, True, False, dtype, exact=True)
    x, bias = inputs(M, weight, dtype).round(), torch.arange(256, device="cuda").to(dtype) / 8

    got = kernel(weight, bias)(x)

    wide = x.double() @ weight.dequantize().double().T + bias.double()
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_no_token_is_no_launch_and_what_does_not_fit_is_refused() -> None:
    w = layer(128, 64, 128, False, False, torch.float16)

    assert cuda.linear(inputs(0, w, torch.float16), w).shape == (0, 64)
    with pytest.raises(ArgumentError, match="scales"):
        marlin.linear(inputs(1, w, torch.bfloat16), w)


def test_the_operator_has_a_schema_and_a_shape_rule_that_hold() -> None:
    w = layer(1024, 256, 128, True, False, torch.float16)
    x = inputs(3, w, torch.float16)
    arguments = (x, w.qweight, w.scales, w.qzeros, None, None, None, 256, 4, 128, True)

    torch.library.opcheck(torch.ops.qload.marlin.default, arguments)
    compiled = torch.compile(lambda x: cuda.linear(x, w) * 2, fullgraph=True, backend="eager")
    assert_same_bits(compiled(x), cuda.linear(x, w) * 2)
