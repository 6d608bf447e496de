"""Few tokens times a weight in Marlin's order, 4 or 8 bits: read-back, exact sums, a bound, the same bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.kernel_formats import GPTQMarlinWeight
from qload.kernels import cuda
from qload.kernels.cuda import decode
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.gpu.layers import DTYPES, Zeros, call, divided, far_apart, inputs, layer

pytestmark = pytest.mark.gpu
Kind = dict[str, Any]
BITS = pytest.mark.parametrize("bits", [4, 8], ids=["4 bits", "8 bits"])
LAYOUT = pytest.mark.parametrize("layout", ["marlin", "strips"])
TOKENS = pytest.mark.parametrize("M", [1, 7, 8, 9, 16, 17, 23, 24, 25, 32, 33, 40, 41, 48])
LAYERS = pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"K": 128, "N": 64, "group": 128}, id="one tile"),
        pytest.param({"K": 1024, "N": 256, "group": 128}, id="groups of 128"),
        pytest.param({"K": 1152, "N": 320, "group": 128, "zeros": True}, id="groups of 128 with zero points"),
        pytest.param({"K": 1024, "N": 256, "group": 64, "zeros": True}, id="groups of 64 with zero points"),
        pytest.param({"K": 960, "N": 192, "group": 32, "zeros": True}, id="groups of 32 with zero points"),
        pytest.param({"K": 1984, "N": 128, "group": -1}, id="one scale a column"),
        pytest.param(
            {"K": 768, "N": 128, "group": -1, "zeros": True}, id="one scale and zero point a column"
        ),
        pytest.param(
            {"K": 1152, "N": 320, "group": 128, "zeros": "centered offsets"}, id="groups of 128 with offsets"
        ),
        pytest.param({"K": 1024, "N": 256, "group": 64, "zeros": "offsets"}, id="groups of 64 with offsets"),
        pytest.param(
            {"K": 960, "N": 72, "group": 32, "zeros": "offsets"}, id="groups of 32 with offsets, padded"
        ),
        pytest.param(
            {"K": 768, "N": 128, "group": -1, "zeros": "offsets"}, id="one scale and offset a column"
        ),
        pytest.param({"K": 1024, "N": 320, "group": 128, "zeros": True, "act_order": True}, id="act order"),
        pytest.param(
            {"K": 416, "N": 72, "group": 32, "zeros": True, "act_order": True}, id="padded act order"
        ),
        pytest.param(
            {"K": 512, "N": 128, "group": 128, "zeros": True, "act_order": True, "share": 2},
            id="a share of one",
        ),
        pytest.param(
            {"K": 416, "N": 72, "group": 32, "act_order": True, "share": 4}, id="a padded share of one"
        ),
        pytest.param({"K": 12352, "N": 1088, "group": 32}, id="K of several phases"),
    ],
)


def drawn(
    kind: Kind, layout: str, bits: int, dtype: torch.dtype, exact: bool = False, M: int = 1
) -> GPTQMarlinWeight:
    if layout == "strips" and "share" in kind:
        pytest.skip("whose groups have rows elsewhere")
    if layout == "marlin" and isinstance(kind.get("zeros"), str):
        pytest.skip("Marlin's order has no offsets")
    weight = layer(**kind, dtype=dtype, bits=bits, exact=exact, layout=layout)
    if most_tokens(weight) < M:
        pytest.skip("so many tokens are for strips, and some for those without zero points")
    return weight


def most_tokens(weight: GPTQMarlinWeight) -> int:
    return decode.most_tokens(call(inputs(1, weight, weight.scales.dtype), weight))


def kernel(weight: GPTQMarlinWeight, bias: Tensor | None = None) -> Any:
    return lambda x: cuda.linear(x, weight, bias, kernel="decode")


@DTYPES
@TOKENS
@pytest.mark.parametrize("in_rows", [False, True], ids=["each of its own size", "a group's alike"])
@pytest.mark.parametrize("K", [128, 2560, 12352])
def test_scales_of_a_column_may_be_far_apart_and_zero(
    K: int, in_rows: bool, M: int, dtype: torch.dtype
) -> None:
    weight = layer(K, 320, 128, dtype=dtype, layout="strips")
    exact, rounded = (far_apart(weight, exact=each, in_rows=in_rows) for each in (True, False))

    one_warp = divided(decode.run, rounded, 5, 1)  # has several groups of a tile one after another
    assert_within_bound(one_warp, rounded, inputs(M, rounded, dtype))
    if K < 12352:  # whose sums are as many as float32 adds exactly
        assert_sums_exactly(kernel(exact), exact, dtype, M=M)
    assert_within_bound(kernel(rounded), rounded, inputs(M, rounded, dtype))


@DTYPES
@TOKENS
@pytest.mark.parametrize("of_all", [True, False], ids=["of all groups", "of some"])
def test_scales_may_be_too_small_to_have_an_exponent(of_all: bool, M: int, dtype: torch.dtype) -> None:
    weight = layer(2560, 320, 128, dtype=dtype, layout="strips")
    scales = weight.scales * 2.0**-8
    if not of_all:
        scales[::3] = weight.scales[::3]
    tiny = replace(weight, scales=scales)

    for run in (kernel(tiny), divided(decode.run, tiny, 5, 1)):
        assert_within_bound(run, tiny, inputs(M, tiny, dtype))


@DTYPES
@BITS
@LAYOUT
@LAYERS
def test_one_input_at_a_time_reads_the_weight_back(
    kind: Kind, layout: str, bits: int, dtype: torch.dtype
) -> None:
    weight = drawn(kind, layout, bits, dtype)

    def in_pieces(x: Tensor) -> Tensor:  # the kernel of eight tokens, of sixteen, and of as many as there are
        pieces = (*x[:64].split(8), *x[64:128].split(16), *x[128:].split(most_tokens(weight)))
        return torch.cat([kernel(weight)(each) for each in pieces])

    assert_reads_back(in_pieces, weight, dtype)


@DTYPES
@BITS
@TOKENS
@LAYOUT
@LAYERS
def test_sums_are_exact_where_they_can_be(
    kind: Kind, layout: str, bits: int, M: int, dtype: torch.dtype
) -> None:
    weight = drawn(kind, layout, bits, dtype, exact=True, M=M)

    assert_sums_exactly(kernel(weight), weight, dtype, M=M)


@DTYPES
@BITS
@TOKENS
@LAYOUT
@LAYERS
def test_sums_are_within_what_rounding_costs(
    kind: Kind, layout: str, bits: int, M: int, dtype: torch.dtype
) -> None:
    weight = drawn(kind, layout, bits, dtype, M=M)

    assert_within_bound(kernel(weight), weight, inputs(M, weight, dtype))


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("M", "layout", "zeros"),
    [(5, "marlin", True), (16, "marlin", True), (16, "strips", True), (24, "strips", True)]
    + [(M, "strips", "offsets") for M in (5, 16, 24)]
    + [(M, "strips", False) for M in (16, 24, 32, 40, 48)],
)
@BITS
def test_every_division_of_a_layer_sums_exactly(
    columns: int, split: int, M: int, layout: str, zeros: Zeros, bits: int
) -> None:
    if split > 1 and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs clusters")
    if columns > 8 and M > 16:
        pytest.skip("a block of so many tokens has eight warps, a tile each")
    if columns > 6 and M > 32:
        pytest.skip("a block has no room for the sums of so many tokens and tiles")
    w = layer(2048, 576, 128, zeros=zeros, exact=True, bits=bits, layout=layout)
    if most_tokens(w) < M:
        pytest.skip("so many tokens are for 4 bits")

    assert_sums_exactly(divided(decode.run, w, columns, split), w, torch.float16, M=M)


@DTYPES
@BITS
@pytest.mark.parametrize(("M", "layout"), [(1, "marlin"), (16, "marlin"), (24, "strips")])
def test_a_bias_is_added_before_the_one_rounding(M: int, layout: str, bits: int, dtype: torch.dtype) -> None:
    weight = layer(1024, 256, 128, zeros=True, dtype=dtype, exact=True, bits=bits, layout=layout)
    x, bias = inputs(M, weight, dtype).round(), torch.arange(256, device="cuda").to(dtype) / 8

    got = kernel(weight, bias)(x)

    wide = x.double() @ weight.dequantize().double().T + bias.double()
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("K", [1024, 1000], ids=["in runs", "padded"])
@pytest.mark.parametrize(("M", "layout"), [(1, "marlin"), (9, "marlin"), (9, "strips"), (19, "strips")])
def test_only_the_rows_of_a_token_reach_it(K: int, M: int, layout: str) -> None:
    weight = layer(K, 256, 32, layout=layout)
    x = inputs(M, weight, torch.float16)
    want = kernel(weight)(x)
    memory = torch.full((M + 2, K), torch.nan, device="cuda", dtype=torch.float16)
    memory[1:-1] = x

    assert_same_bits(kernel(weight)(memory[1:-1]), want)


def test_nothing_but_y_is_written() -> None:
    weight = layer(1000, 88, 32, zeros=True)
    x = inputs(3, weight, torch.float16)
    read = (x, weight.qweight, weight.scales, weight.qzeros)
    before = [each.clone() for each in read if each is not None]
    pool = torch.full((64, 3, 88), torch.nan, device="cuda", dtype=torch.float16)
    del pool  # y comes from this memory: what a kernel leaves out is NaN

    y = decode.run(call(x, weight))

    assert not bool(y.isnan().any())
    for each, was in zip((tensor for tensor in read if tensor is not None), before, strict=True):
        assert_same_bits(each, was)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ({"layout": "marlin"}, 16),
        ({"layout": "strips"}, 48),
        ({"layout": "strips", "zeros": True}, 24),
        ({"layout": "strips", "zeros": "offsets"}, 24),
        ({"layout": "strips", "group": 64}, 24),
        ({"layout": "strips", "bits": 8}, 24),
    ],
)
def test_more_tokens_are_refused(kind: Kind, most: int) -> None:
    weight = layer(**{"K": 128, "N": 64, "group": 128, **kind})
    reason = decode.why_not(call(inputs(most + 1, weight, torch.float16), weight))

    assert decode.why_not(call(inputs(most, weight, torch.float16), weight)) is None
    assert reason == f"takes at most {most} tokens, got {most + 1}"
