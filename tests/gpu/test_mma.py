"""float16 times 4-bit strips without wgmma: read-back, exact sums, derived bounds, the same bits."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qload.kernel_formats import GPTQMarlinWeight
from qload.kernels import cuda
from qload.kernels.cuda import linear, marlin, mma_gemm
from qload.kernels.cuda.mma_gemm import SHARES, WARP_TOKENS, WARPS, MmaDivision
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.gpu.layers import call, far_apart, inputs, layer
from tests.gpu.test_many import LAYERS

pytestmark = pytest.mark.gpu
F16 = torch.float16
TOKENS = [1, 17, 32, 33, 49, 64, 65, 97, 129, 300]
WAYS = [
    (tokens, tiles, row_warps)
    for tokens in WARP_TOKENS
    for tiles in SHARES
    for row_warps in SHARES
    if WARPS % (tiles * row_warps) == 0 and mma_gemm.fits(MmaDivision(tokens, tiles, row_warps, 1))
]


@pytest.fixture(autouse=True, scope="module")
def _module() -> None:
    reason = cuda.why_not()
    if reason:
        pytest.skip(reason)


def kernel(weight: GPTQMarlinWeight, how: MmaDivision | None = None) -> Callable[[Tensor], Tensor]:
    return lambda x: mma_gemm.run(call(x, weight), how)


@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order"), LAYERS)
def test_one_input_at_a_time_reads_the_weight_back(
    K: int, N: int, group: int, zeros: bool, act_order: bool
) -> None:
    weight = layer(K, N, group, zeros, act_order, layout="strips")

    assert_reads_back(kernel(weight), weight, F16)


@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order"), LAYERS)
def test_sums_are_exact_where_they_can_be_and_within_what_rounding_costs(
    K: int, N: int, group: int, zeros: bool, act_order: bool, M: int
) -> None:
    exact = layer(K, N, group, zeros, act_order, exact=True, layout="strips")
    rounded = layer(K, N, group, zeros, act_order, layout="strips")

    assert_sums_exactly(kernel(exact), exact, F16, M=M)
    assert_within_bound(kernel(rounded), rounded, inputs(M, rounded, F16))


@pytest.mark.parametrize(("tokens", "tiles", "row_warps"), WAYS)
@pytest.mark.parametrize("slices", [1, 2, 7])
@pytest.mark.parametrize(("group", "zeros"), [(32, True), (128, False), (-1, True)])
def test_every_division_of_a_layer_sums_exactly_and_gives_the_same_bits_again(
    tokens: int, tiles: int, row_warps: int, slices: int, group: int, zeros: bool
) -> None:
    weight = layer(1920, 832, group, zeros, exact=True, layout="strips")
    how = MmaDivision(tokens, tiles, row_warps, slices)
    divided = kernel(weight, how)

    for M in (1, tokens + 1, how.block_tokens, how.block_tokens + 5):
        assert_sums_exactly(divided, weight, F16, M=M)
        x = inputs(M, weight, F16)
        assert_same_bits(divided(x), divided(x))


def test_scales_of_a_column_may_be_far_apart() -> None:
    weight = far_apart(layer(1024, 320, 32, True, layout="strips"), exact=False)

    assert_within_bound(kernel(weight), weight, inputs(100, weight, F16))


@pytest.mark.parametrize("how", [None, MmaDivision(64, 4, 2, 3)], ids=["chosen", "sliced"])
def test_a_bias_is_added_before_the_one_rounding(how: MmaDivision | None) -> None:
    weight = layer(1024, 256, 128, True, exact=True, layout="strips")
    x, bias = inputs(33, weight, F16).round(), torch.arange(256, device="cuda").to(F16) / 8

    got = mma_gemm.run(replace(call(x, weight), bias=bias), how)

    wide = x.double() @ weight.dequantize().double().T + bias.double()
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(F16).eps, atol=torch.finfo(F16).eps)


@pytest.mark.parametrize("M", [0, 1, 100])
def test_a_chip_before_hopper_takes_it(M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = layer(1024, 256, 64, True, layout="strips")
    x = inputs(M, weight, F16)
    expected = kernel(weight)(x)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))

    assert_same_bits(linear(x, weight), expected)


def test_a_compiled_model_calls_it_whole() -> None:
    weight = layer(1024, 256, 128, True, layout="strips")
    x = inputs(65, weight, F16)

    torch.library.opcheck(torch.ops.qload.strips.default, marlin.arguments(x, weight), {"asked": "mma"})
    compiled = torch.compile(lambda x: linear(x, weight, kernel="mma") * 2, fullgraph=True, backend="eager")
    assert_same_bits(compiled(x), linear(x, weight, kernel="mma") * 2)
