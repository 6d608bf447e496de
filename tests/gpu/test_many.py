"""17 tokens and more on strips: read-back, exact sums, a derived bound, the same bits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.kernel_formats import GPTQMarlinWeight, repack
from qload.kernels import cuda
from qload.kernels.cuda import hopper_gemm, launch, linear, marlin
from qload.kernels.cuda.hopper_gemm import PLACES, STAGE, ManyDivision
from qload.layouts import Stored
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.gpu.layers import DTYPES, Zeros, call, far_apart, inputs, layer
from tests.kernels.mp_layers import Case

pytestmark = pytest.mark.gpu
TOKENS = [1, 17, 31, 32, 33, 63, 64, 65, 96, 97, 128, 129, 192, 255, 256, 257, 300]
BITS = pytest.mark.parametrize("bits", [4, 8])
LAYERS = [  # K, N, group, zero points, act order
    pytest.param(128, 64, 128, False, False, id="one unit"),
    pytest.param(1024, 256, 128, False, False, id="groups of 128"),
    pytest.param(1152, 576, 128, True, False, id="groups of 128 with zero points"),
    pytest.param(1024, 576, 64, True, False, id="groups of 64 with zero points"),
    pytest.param(2048, 64, 64, False, False, id="groups of 64"),
    pytest.param(1920, 832, 32, True, False, id="groups of 32 with zero points"),
    pytest.param(960, 320, 32, False, False, id="groups of 32, padded"),
    pytest.param(1984, 128, -1, False, False, id="one scale a column"),
    pytest.param(768, 1088, -1, True, False, id="one scale and zero point a column"),
    pytest.param(1024, 320, 128, "offsets", False, id="groups of 128 with offsets"),
    pytest.param(1024, 576, 64, "offsets", False, id="groups of 64 with offsets"),
    pytest.param(960, 72, 32, "centered offsets", False, id="groups of 32 with offsets, padded"),
    pytest.param(768, 1088, -1, "offsets", False, id="one scale and offset a column"),
    pytest.param(1024, 320, 128, True, True, id="act order"),
    pytest.param(416, 72, 32, True, True, id="padded act order"),
]
SHAPES = [
    pytest.param(
        kind.tokens, kind.columns, kind.teams, bits, id=f"{kind.tokens}-{kind.columns}-{kind.teams}-{bits}"
    )
    for kind in hopper_gemm.BLOCK_SHAPES
    for bits in (4, 8)
    if bits in kind.stages
]
PAIRS = pytest.mark.parametrize("pairs", [False, True])
TWO = pytest.mark.parametrize("two", ["alone", "pairs", "neighbours", "both"])


@pytest.fixture(autouse=True, scope="module")
def _hopper() -> None:
    reason = cuda.why_not()
    if reason or torch.cuda.get_device_capability()[0] != launch.HOPPER:
        pytest.skip(reason or "needs Hopper")


def strips(*shape: Any, **kind: Any) -> GPTQMarlinWeight:
    """A layer of `tests.gpu.layers` in strips."""
    return layer(*shape, layout="strips", **kind)


def kernel(weight: GPTQMarlinWeight, how: ManyDivision | None = None) -> Callable[[Tensor], Tensor]:
    return lambda x: hopper_gemm.run(call(x, weight), how)


def assert_exact_and_the_same_again(
    divided: Callable[[Tensor], Tensor], weight: GPTQMarlinWeight, dtype: Any, M: int
) -> None:
    assert_sums_exactly(divided, weight, dtype, M=M)
    x = inputs(M, weight, dtype)
    assert_same_bits(divided(x), divided(x))


def division_of(K: int, tokens: int, columns: int, teams: int, two: str, slices: int = 1) -> ManyDivision:
    """How blocks divide K rows; skips what no launch is."""
    how = ManyDivision(
        tokens, columns, two in ("pairs", "both"), slices, two in ("neighbours", "both"), teams
    )
    if teams > 1 and how.neighbours:
        pytest.skip("blocks with teams share no x: the kernel refuses them as neighbours")
    if how.parts * STAGE > K:
        pytest.skip(f"{K} rows have fewer stages than {how.parts} parts")
    return how


@DTYPES
@BITS
@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order"), LAYERS)
def test_one_input_at_a_time_reads_the_weight_back(
    K: int, N: int, group: int, zeros: Zeros, act_order: bool, bits: int, dtype: Any
) -> None:
    weight = strips(K, N, group, zeros, act_order, dtype, bits=bits)

    assert_reads_back(kernel(weight), weight, dtype)


@DTYPES
@BITS
@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order"), LAYERS)
def test_sums_are_exact_where_they_can_be_and_within_what_rounding_costs(
    K: int, N: int, group: int, zeros: Zeros, act_order: bool, M: int, bits: int, dtype: Any
) -> None:
    exact = strips(K, N, group, zeros, act_order, dtype, exact=True, bits=bits)
    rounded = strips(K, N, group, zeros, act_order, dtype, bits=bits)

    assert_sums_exactly(kernel(exact), exact, dtype, M=M)
    assert_within_bound(kernel(rounded), rounded, inputs(M, rounded, dtype))


@DTYPES
@pytest.mark.parametrize(("tokens", "columns", "teams", "bits"), SHAPES)
@TWO
@pytest.mark.parametrize("slices", [1, 2, 7])
@pytest.mark.parametrize(("group", "zeros"), [(32, True), (128, False), (64, "offsets")])
def test_every_division_of_a_layer_sums_exactly_and_gives_the_same_bits_again(
    tokens: int,
    columns: int,
    teams: int,
    bits: int,
    two: str,
    slices: int,
    group: int,
    zeros: Zeros,
    dtype: Any,
) -> None:
    if two == "both" and slices > 1:
        pytest.skip("halves of a last turn are of one slice")
    if isinstance(zeros, str) and (tokens, columns, teams) not in hopper_gemm.OFFSET_SHAPES:
        pytest.skip("no kernel of this shape subtracts offsets")
    how = division_of(1920, tokens, columns, teams, two, slices)
    weight = strips(1920, 832, group, zeros, False, dtype, exact=True, bits=bits)
    divided = kernel(weight, how)

    for M in (1, tokens // 2, tokens // 2 + 3, tokens, tokens + 1, 3 * tokens - 5):
        assert_exact_and_the_same_again(divided, weight, dtype, M)


@DTYPES
@pytest.mark.parametrize(("tokens", "columns", "teams", "bits"), SHAPES)
@TWO
@pytest.mark.parametrize(("K", "group", "zeros"), [(128, 32, True), (256, 128, False), (640, 64, False)])
def test_blocks_that_take_more_than_one_tile_sum_exactly(
    tokens: int, columns: int, teams: int, bits: int, two: str, K: int, group: int, zeros: bool, dtype: Any
) -> None:
    how = division_of(K, tokens, columns, teams, two)
    weight = strips(K, 832, group, zeros, False, dtype, exact=True, bits=bits)
    wide, places = (columns, PLACES) if two == "alone" else (2 * columns, PLACES // 2)
    tall = places // -(-832 // wide) + 2  # some tiles of a second turn
    divided = kernel(weight, how)

    for M in (tall * tokens - tokens // 2 - 3, tall * tokens):
        assert_exact_and_the_same_again(divided, weight, dtype, M)


@DTYPES
@pytest.mark.parametrize(("tokens", "columns", "teams", "bits"), SHAPES)
@PAIRS
def test_scales_of_a_column_may_be_far_apart_and_zero(
    tokens: int, columns: int, teams: int, bits: int, pairs: bool, dtype: Any
) -> None:
    weight = strips(2560, 320, 128, False, False, dtype, bits=bits)
    exact, rounded = far_apart(weight, exact=True), far_apart(weight, exact=False)
    how = ManyDivision(tokens, columns, pairs, 1, teams=teams)

    assert_sums_exactly(kernel(exact, how), exact, dtype, M=tokens + 1)
    assert_within_bound(kernel(rounded, how), rounded, inputs(tokens + 1, rounded, dtype))
    assert_reads_back(kernel(rounded, how), rounded, dtype)


@DTYPES
@BITS
@pytest.mark.parametrize("group", [128, -1])
def test_every_size_of_scales_is_multiplied_right(group: int, bits: int, dtype: Any) -> None:
    weight = strips(512, 128, group, False, False, dtype, exact=True, bits=bits)
    least, most = (-24, 16) if dtype == torch.float16 else (-100, 100)
    for power in range(least, most, 4):
        scales = torch.full_like(weight.scales, 2.0**power)
        each = replace(weight, scales=scales)
        x = torch.ones(40, 512, dtype=dtype, device="cuda") * 2.0**-8
        x[:, ::3] = 0
        want = (x.double() @ each.dequantize().double().T).to(dtype)

        assert_same_bits(kernel(each)(x), want)


@BITS
@pytest.mark.parametrize(("K", "N"), [(128, 64), (128, 4096), (28672, 128), (4096, 64 * 700)])
@pytest.mark.parametrize("M", [32, 64, 256, 1000])
def test_the_division_that_is_chosen_sums_exactly(K: int, N: int, M: int, bits: int) -> None:
    weight = strips(K, N, -1, False, False, torch.float16, exact=True, bits=bits)

    assert_sums_exactly(lambda x: linear(x, weight, kernel="many"), weight, torch.float16, M=M)


@DTYPES
@BITS
@pytest.mark.parametrize("slices", [1, 4])
@PAIRS
def test_a_bias_is_added_before_the_one_rounding(
    pairs: bool, slices: int, bits: int, dtype: torch.dtype
) -> None:
    weight = strips(1024, 256, 128, True, False, dtype, exact=True, bits=bits)
    x, bias = inputs(65, weight, dtype).round(), torch.arange(256, device="cuda").to(dtype) / 8
    biased = replace(call(x, weight), bias=bias)

    got = hopper_gemm.run(biased, ManyDivision(64, 128, pairs, slices))

    wide = x.double() @ weight.dequantize().double().T + bias.double()
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@BITS
def test_it_gives_the_same_bits_in_a_graph_and_a_hundred_times(bits: int) -> None:
    weight = strips(2048, 512, 128, False, False, torch.float16, bits=bits)
    for how in (
        ManyDivision(64, 128, True, 1),
        ManyDivision(96, 256, False, 4),
        ManyDivision(128, 128, True, 2),
        ManyDivision(64, 64, True, 1, teams=2),
        ManyDivision(64, 128, False, 3, teams=2),
    ):
        x, run = inputs(100, weight, torch.float16), kernel(weight, how)
        first = run(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [run(x) for _ in range(20)]
        for _ in range(5):
            graph.replay()
            for each in captured:
                assert_same_bits(each, first)


def test_what_does_not_fit_is_refused_with_a_reason() -> None:
    weight = strips(128, 64, 128, False, False, torch.float16)
    few = call(inputs(20, weight, torch.float16), weight)
    memory = torch.empty(weight.qweight.numel() + 1, dtype=torch.int32, device="cuda")
    moved = memory[1:].view(weight.qweight.shape)

    assert hopper_gemm.why_not(few) is None
    assert "multiples of 16 bytes" in str(hopper_gemm.why_not(replace(few, weights=moved)))


@BITS
@pytest.mark.parametrize("M", [33, 257])
def test_a_compiled_model_calls_it_whole(M: int, bits: int) -> None:
    weight = strips(1024, 256, 128, True, False, torch.float16, bits=bits)
    x = inputs(M, weight, torch.float16)

    arguments = marlin.arguments(x, weight)
    torch.library.opcheck(torch.ops.qload.strips.default, arguments, {"asked": "many"})
    compiled = torch.compile(lambda x: linear(x, weight, kernel="many") * 2, fullgraph=True, backend="eager")
    assert_same_bits(compiled(x), linear(x, weight, kernel="many") * 2)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act order"])
@pytest.mark.parametrize("zeros", [None, Stored()], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("M", [1, 16, 40, 100])
def test_two_and_three_bits_sum_exactly(M: int, zeros: Stored | None, act_order: bool, bits: int) -> None:
    case = Case(bits=bits, group=64, zeros=zeros, act_order=act_order, N=192, K=1024)
    weight = repack(case.weight(scale=0.5), "strips").to("cuda")

    assert_sums_exactly(lambda x: weight.get_linear()(x), weight, torch.float16, M=M)
