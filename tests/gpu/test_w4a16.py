"""The 4-bit linear on Marlin's order: read-back, exact sums, a derived bound, the same bits every time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.formats import GPTQConfig, GPTQWeight
from qload.kernels import GPTQMarlinWeight, cuda, repack
from qload.kernels.cuda import marlin, w4a16
from qload.layouts import Stored, gptq
from qload.spec import Weight
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
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


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    reason = cuda.why_not()
    if reason:
        pytest.skip(reason)


def layer(
    K: int, N: int, group: int, zeros: bool, act_order: bool, dtype: torch.dtype, exact: bool = False
) -> GPTQMarlinWeight:
    """Random codes; `exact`: few zero points away from the codes, scales that are powers of two."""
    make = torch.Generator().manual_seed(K + N)
    groups = 1 if group == -1 else -(-K // group)
    codes = torch.randint(16, (K, N), generator=make)
    points = torch.randint(16, (groups, N), generator=make) if zeros else torch.full((groups, N), 8)
    scales = 2.0 ** torch.randint(-3, 0, (groups, N), generator=make)
    if not exact:
        scales = torch.rand(groups, N, generator=make) * 0.02 + 0.001
    g_idx = torch.arange(K) // (K if group == -1 else group)
    if act_order:
        g_idx = g_idx[torch.randperm(K, generator=make)]
    weight = GPTQWeight(
        config=GPTQConfig(4, group, zeros=Stored()),
        qweight=gptq.rows(4).pack(codes),
        qzeros=Stored().write(points, gptq.columns(4)),
        scales=scales.to(dtype),
        g_idx=g_idx.to(torch.int32),
    )
    made = repack(weight, "marlin")
    assert isinstance(made, GPTQMarlinWeight)
    assert made.config.zero_point == zeros
    assert cuda.why_not_linear(made.to("cuda"), dtype) is None
    return made.to("cuda")


def kernel(weight: GPTQMarlinWeight, bias: Tensor | None = None) -> Any:
    return lambda x: cuda.linear(x, weight, bias)


def call(x: Tensor, w: GPTQMarlinWeight) -> marlin.MarlinCall:
    read = (w.qweight, w.scales, w.qzeros, w.g_idx, w.perm, None, w.layer.N)
    return marlin.MarlinCall(x, *read, w.config.bits, w.config.group_size, w.config.is_k_full)


def inputs(M: int, weight: Weight, dtype: torch.dtype) -> Tensor:
    make = torch.Generator(device="cuda").manual_seed(M)
    return torch.randn(M, weight.layer.K, device="cuda", generator=make).to(dtype)


@DTYPES
@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order"), LAYERS)
def test_one_input_at_a_time_reads_the_weight_back(
    K: int, N: int, group: int, zeros: bool, act_order: bool, dtype: torch.dtype
) -> None:
    weight = layer(K, N, group, zeros, act_order, dtype)

    def in_pieces(x: Tensor) -> Tensor:  # the kernel of few tokens, then that of many
        return torch.cat([cuda.linear(each, weight) for each in (*x[:16].split(8), *x[16:].split(64))])

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

    def divided(x: Tensor) -> Tensor:
        return w4a16.run(call(x, w), columns, split)

    assert_sums_exactly(divided, w, torch.float16, M=M)


@pytest.mark.parametrize("M", [1, 8, 16, 64])
def test_blocks_that_take_several_tiles_in_turns_sum_exactly(M: int) -> None:
    w = layer(1024, 64 * 700, 128, True, False, torch.float16, exact=True)
    for columns, split in ((1, 1), (1, 2), (2, 2), (4, 1), (0, 0)):

        def divided(x: Tensor, columns: int = columns, split: int = split) -> Tensor:
            return w4a16.run(call(x, w), columns, split)

        assert_sums_exactly(divided, w, torch.float16, M=M)


@DTYPES
@pytest.mark.parametrize("M", [1, 16, 64, 65])
def test_a_bias_is_added_before_the_one_rounding(M: int, dtype: torch.dtype) -> None:
    weight = layer(1024, 256, 128, True, False, dtype, exact=True)
    x, bias = inputs(M, weight, dtype).round(), torch.arange(256, device="cuda").to(dtype) / 8

    got = cuda.linear(x, weight, bias)

    wide = x.double() @ weight.dequantize().double().T + bias.double()
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("M", [1, 9, 64])
def test_only_the_rows_of_a_token_reach_it_and_nothing_else_is_written(M: int) -> None:
    weight = layer(1024, 256, 128, False, False, torch.float16)
    x = inputs(M, weight, torch.float16)
    want = cuda.linear(x, weight)
    memory = torch.full((M + 2, 1024), torch.nan, device="cuda", dtype=torch.float16)
    memory[1:-1] = x

    assert_same_bits(cuda.linear(memory[1:-1], weight), want)


@pytest.mark.parametrize("M", [1, 8, 16, 33])
def test_a_hundred_runs_have_the_same_bits(M: int) -> None:
    weight = layer(4096, 1024, 128, True, False, torch.float16)
    x = inputs(M, weight, torch.float16)
    want = cuda.linear(x, weight)

    for _ in range(100):
        assert_same_bits(cuda.linear(x, weight), want)


def test_layers_one_after_another_in_a_graph_see_each_other() -> None:
    """What a kernel reads the kernel before has written, though it may start before that ends."""
    weights = [layer(1024, 1024, 128, False, False, torch.float16) for _ in range(2)]
    x = inputs(4, weights[0], torch.float16)

    def chain() -> Tensor:
        y = x
        for _ in range(10):
            for weight in weights:
                y = cuda.linear(y, weight)
        return y

    want = chain()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = chain()
    for _ in range(20):
        got.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(got, want)


def test_two_streams_do_not_meet() -> None:
    weight = layer(2048, 1024, 128, True, False, torch.float16)
    x = [inputs(M, weight, torch.float16) for M in (3, 16)]
    want = [cuda.linear(each, weight) for each in x]
    streams, got = [torch.cuda.Stream(), torch.cuda.Stream()], []

    torch.cuda.synchronize()
    for _ in range(50):
        for i in (0, 1):
            with torch.cuda.stream(streams[i]):
                got.append((i, cuda.linear(x[i], weight)))
    torch.cuda.synchronize()

    for i, y in got:
        assert_same_bits(y, want[i])


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
