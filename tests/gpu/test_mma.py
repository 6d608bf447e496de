"""17 tokens and more on strips without wgmma: read-back, exact sums, derived bounds, the same bits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.kernels import cuda
from qload.kernels.chips import shared_memory
from qload.kernels.cuda import linear, marlin, mma_gemm
from qload.kernels.cuda.byte_strips import ByteStripsCall, arguments
from qload.kernels.cuda.mma_gemm import WARPS, MmaDivision
from qload.spec import Weight
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.gpu import test_byte_strips as in_bytes
from tests.gpu.layers import DTYPES, Zeros, call, far_apart, inputs, layer
from tests.gpu.test_many import BITS, LAYERS

pytestmark = pytest.mark.gpu
MOST_SHARED = 227 << 10  # bytes of a block, on any chip
TOKENS = [1, 17, 32, 33, 49, 64, 65, 97, 129, 300]
WAYS = [
    (tokens, tiles, row_warps)
    for tokens in mma_gemm.WARP_TOKENS
    for tiles in mma_gemm.SHARES
    for row_warps in mma_gemm.SHARES
    if WARPS % (tiles * row_warps) == 0
    and mma_gemm.fits(MmaDivision(tokens, tiles, row_warps, 1), MOST_SHARED)
]


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    reason = cuda.why_not()
    if reason:
        pytest.skip(reason)


def kernel(weight: Any, how: MmaDivision | None = None) -> Callable[[Tensor], Tensor]:
    """Multiply by the kernel; `how` None: as it divides by itself."""

    def run(x: Tensor) -> Tensor:
        made = call(x, weight) if hasattr(weight, "perm") else ByteStripsCall(*arguments(x, weight))
        return mma_gemm.run(made, how)

    return run


@DTYPES
@BITS
@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order"), LAYERS)
def test_one_input_at_a_time_reads_the_weight_back(
    K: int, N: int, group: int, zeros: Zeros, act_order: bool, bits: int, dtype: Any
) -> None:
    weight = layer(K, N, group, zeros, act_order, dtype, bits=bits, layout="strips")

    assert_reads_back(kernel(weight), weight, dtype)


@DTYPES
@BITS
@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order"), LAYERS)
def test_sums_are_exact_where_they_can_be_and_within_what_rounding_costs(
    K: int, N: int, group: int, zeros: Zeros, act_order: bool, M: int, bits: int, dtype: Any
) -> None:
    exact = layer(K, N, group, zeros, act_order, dtype, exact=True, bits=bits, layout="strips")
    rounded = layer(K, N, group, zeros, act_order, dtype, bits=bits, layout="strips")

    assert_sums_exactly(kernel(exact), exact, dtype, M=M)
    assert_within_bound(kernel(rounded), rounded, inputs(M, rounded, dtype))


@DTYPES
@pytest.mark.parametrize("M", [17, 65, 129])
@in_bytes.LAYERS
def test_numbers_are_multiplied_as_exactly(K: int, N: int, per: str, M: int, dtype: torch.dtype) -> None:
    exact, rounded = in_bytes.layer(K, N, per, exact=True), in_bytes.layer(K, N, per)

    assert_sums_exactly(kernel(exact), exact, dtype, M=M)
    assert_within_bound(kernel(rounded), rounded, inputs(M, rounded, dtype))


@BITS
@pytest.mark.parametrize(("tokens", "tiles", "row_warps"), WAYS)
@pytest.mark.parametrize("slices", [1, 2, 7])
@pytest.mark.parametrize(("group", "zeros"), [(32, True), (128, False), (-1, True), (32, "offsets")])
def test_every_division_of_a_layer_sums_exactly_and_gives_the_same_bits_again(
    tokens: int, tiles: int, row_warps: int, slices: int, group: int, zeros: Zeros, bits: int
) -> None:
    weight = layer(1920, 832, group, zeros, False, torch.bfloat16, exact=True, bits=bits, layout="strips")
    how = MmaDivision(tokens, tiles, row_warps, slices)
    if not mma_gemm.fits(how, shared_memory(torch.device("cuda"))):
        pytest.skip("two stages take more shared memory than this chip has")
    divided = kernel(weight, how)

    for M in (1, tokens + 1, how.block_tokens, how.block_tokens + 5):
        assert_sums_exactly(divided, weight, torch.bfloat16, M=M)
        x = inputs(M, weight, torch.bfloat16)
        assert_same_bits(divided(x), divided(x))


@DTYPES
@BITS
def test_scales_of_a_column_may_be_far_apart(bits: int, dtype: torch.dtype) -> None:
    held = layer(1024, 320, 32, True, False, dtype, bits=bits, layout="strips")
    weight = far_apart(held, exact=False)

    assert_within_bound(kernel(weight), weight, inputs(100, weight, dtype))


@DTYPES
@pytest.mark.parametrize("how", [None, MmaDivision(64, 4, 2, 3)], ids=["whole", "sliced"])
def test_bias_and_factors_of_tokens_are_applied_before_the_one_rounding(
    how: MmaDivision | None, dtype: torch.dtype
) -> None:
    weight = layer(1024, 256, 128, True, False, dtype, exact=True, bits=8, layout="strips")
    x, bias = inputs(33, weight, dtype).round(), torch.arange(256, device="cuda").to(dtype) / 8
    factors = 2.0 ** torch.arange(33, device="cuda").float().sub(16).div(4).floor()

    got = mma_gemm.run(replace(call(x, weight), bias=bias, token_scales=factors), how)

    sums = x.double() @ weight.dequantize().double().T
    wide = sums * factors.double()[:, None] + bias.double()
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_an_nan_of_fp8_stays_one() -> None:
    weight = in_bytes.layer(128, 64, "channel")
    words = weight.qweight.clone()
    words.view(torch.uint8).view(-1)[0] = 0x7F
    broken = weight.holding({**weight.fields(), "qweight": words})

    y = kernel(broken)(torch.ones(33, 128, device="cuda", dtype=torch.bfloat16))

    assert torch.equal(y.isnan(), broken.dequantize().isnan().any(1).expand(33, -1))


def test_a_chip_before_hopper_takes_it_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[Weight] = [layer(1024, 256, 64, True, layout="strips"), in_bytes.layer(1024, 256, "nvfp4")]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))

    for weight in weights:
        x = inputs(100, weight, torch.float16)

        assert_same_bits(linear(x, weight), kernel(weight)(x))
        assert linear(x[:0], weight).shape == (0, 256)


def test_a_compiled_model_calls_it_whole() -> None:
    weight = layer(1024, 256, 128, True, False, torch.float16, bits=8, layout="strips")
    x = inputs(65, weight, torch.float16)

    torch.library.opcheck(torch.ops.qload.strips.default, marlin.arguments(x, weight), {"asked": "mma"})
    compiled = torch.compile(lambda x: linear(x, weight, kernel="mma") * 2, fullgraph=True, backend="eager")
    assert_same_bits(compiled(x), linear(x, weight, kernel="mma") * 2)
