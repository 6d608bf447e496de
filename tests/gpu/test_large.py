"""Dequantize and the vendor's product, whole and in slices of columns: the three oracles, and the memory."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qload.kernel_formats import GPTQMarlinWeight
from qload.kernels import products
from qload.kernels.cuda import large, marlin
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.gpu.layers import DTYPES, Zeros, call, inputs, layer

pytestmark = pytest.mark.gpu
LAYERS = [  # K, N, group, zero points, act order, bits
    pytest.param(128, 64, 128, False, False, 4, id="one tile"),
    pytest.param(1024, 2624, 64, True, False, 4, id="groups of 64 with zero points"),
    pytest.param(960, 1152, 32, True, False, 4, id="groups of 32 with zero points"),
    pytest.param(768, 2048, -1, False, False, 4, id="one scale a column"),
    pytest.param(1024, 2624, 64, "offsets", False, 4, id="groups of 64 with offsets"),
    pytest.param(768, 1088, -1, "centered offsets", False, 8, id="8 bits, one scale and offset a column"),
    pytest.param(424, 72, 32, "offsets", False, 8, id="8 bits, padded, with offsets"),
    pytest.param(1024, 1344, 128, True, True, 4, id="act order"),
    pytest.param(416, 1032, 32, True, True, 4, id="padded act order"),
    pytest.param(424, 72, -1, True, False, 4, id="padded rows and columns"),
    pytest.param(1024, 2112, 128, False, False, 8, id="8 bits, groups of 128"),
    pytest.param(768, 1088, -1, True, False, 8, id="8 bits, one scale and zero point a column"),
]
WAYS = pytest.mark.parametrize("scratch", [0, products.GPU_SLICE_BYTES], ids=["in slices", "whole"])
LAYOUT = pytest.mark.parametrize("layout", ["marlin", "strips"])


def kernel(weight: GPTQMarlinWeight, scratch: int) -> Callable[[Tensor], Tensor]:
    return lambda x: large.run(call(x, weight), scratch)


@WAYS
@LAYOUT
@DTYPES
@pytest.mark.parametrize(("K", "N", "group", "zeros", "act_order", "bits"), LAYERS)
def test_the_three_oracles(
    K: int,
    N: int,
    group: int,
    zeros: Zeros,
    act_order: bool,
    bits: int,
    scratch: int,
    layout: str,
    dtype: torch.dtype,
) -> None:
    if layout == "marlin" and isinstance(zeros, str):
        pytest.skip("Marlin's order has no offsets")
    exact = layer(K, N, group, zeros, act_order, dtype, exact=True, bits=bits, layout=layout)
    rounded = layer(K, N, group, zeros, act_order, dtype, bits=bits, layout=layout)

    assert_reads_back(kernel(rounded, scratch), rounded, dtype)
    assert_sums_exactly(kernel(exact, scratch), exact, dtype, M=100)
    assert_within_bound(kernel(rounded, scratch), rounded, inputs(257, rounded, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("K", [512, 416], ids=["whole", "padded"])
def test_rows_whose_groups_only_an_index_knows_are_multiplied(K: int, dtype: torch.dtype) -> None:
    weight = layer(K, 128, 32, True, True, dtype, exact=True, share=4)

    assert_reads_back(kernel(weight, 0), weight, dtype)
    assert_sums_exactly(kernel(weight, 0), weight, dtype, M=70)


@WAYS
@DTYPES
def test_a_bias_is_added(scratch: int, dtype: torch.dtype) -> None:
    weight = layer(1024, 1344, 128, True, False, dtype, exact=True)
    x, bias = inputs(90, weight, dtype).round(), torch.arange(1344, device="cuda").to(dtype) / 8

    got = large.run(replace(call(x, weight), bias=bias), scratch)

    wide = x.double() @ weight.dequantize().double().T + bias.double()
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_slices_lie_in_the_same_memory_one_after_another() -> None:
    weight = layer(1024, 16 * products.OUTPUT_MULTIPLE, 128, False, False, torch.float16)
    x = inputs(64, weight, torch.float16)
    kernel(weight, 0)(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    y = kernel(weight, 0)(x)

    slice_bytes = 2 * 1024 * products.OUTPUT_MULTIPLE
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + slice_bytes
    assert_same_bits(y, kernel(weight, 0)(x))


def test_a_graph_replays_it() -> None:
    weight = layer(1024, 4 * products.OUTPUT_MULTIPLE, 128, True, False, torch.float16, exact=True)
    x = inputs(64, weight, torch.float16)
    want, stream = kernel(weight, 0)(x), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kernel(weight, 0)(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = kernel(weight, 0)(x)

    for _ in range(5):
        got.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(got, want)


def test_a_compiled_model_calls_it_whole() -> None:
    weight = layer(1024, 256, 128, True, False, torch.float16)
    x = inputs(300, weight, torch.float16)

    def twice(x: Tensor) -> Tensor:
        return marlin.linear(x, weight, kernel="large") * 2

    assert_same_bits(torch.compile(twice, fullgraph=True, backend="eager")(x), twice(x))
