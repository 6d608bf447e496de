"""Codes of numbers in strips: read-back, exact sums, bounds, NaN, bits, for few and many tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.formats import (
    BNBConfig,
    BNBWeight,
    CTNVFP4Weight,
    Fp8Config,
    Fp8Weight,
    ModelOptNVFP4Weight,
)
from qload.kernel_formats import Fp8StripsWeight, TableStripsWeight, repack, restore
from qload.kernels import cuda
from qload.kernels.cuda import decode, hopper_gemm, launch
from qload.kernels.cuda.byte_strips import ByteStripsCall, ByteStripsWeight, arguments
from qload.kernels.cuda.hopper_gemm import PLACES, STAGE, ManyDivision
from qload.spec import Layer
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.gpu.layers import DTYPES, inputs
from tests.kernel_formats.bnb4_layers import bnb4
from tests.kernel_formats.fp4_layers import mxfp4, nvfp4
from tests.kernel_formats.test_mxfp8_strips import mxfp8

pytestmark = pytest.mark.gpu
MAX_DECODED = 24
LAYERS = pytest.mark.parametrize(
    ("K", "N", "per"),
    [
        pytest.param(128, 64, "channel", id="one unit"),
        pytest.param(1024, 256, "tensor", id="one scale"),
        pytest.param(1984, 200, "channel", id="a scale an output, padded"),
        pytest.param(1152, 320, "int8", id="int8"),
        pytest.param(1000, 200, "int8", id="padded int8"),
        pytest.param(1152, 320, "block", id="blocks"),
        pytest.param(1000, 1000, "block", id="padded blocks"),
        pytest.param(12352, 1088, "block", id="K of several phases"),
        pytest.param(1984, 200, "e5m2", id="padded e5m2"),
        pytest.param(128, 64, "mxfp8", id="one unit of mxfp8"),
        pytest.param(1984, 200, "mxfp8", id="padded mxfp8"),
        pytest.param(12352, 1088, "mxfp8", id="mxfp8, K of several phases"),
        pytest.param(128, 64, "nvfp4", id="one unit of nvfp4"),
        pytest.param(1008, 200, "nvfp4", id="padded nvfp4"),
        pytest.param(12352, 1088, "nvfp4", id="nvfp4, K of several phases"),
        pytest.param(1152, 320, "mxfp4", id="mxfp4"),
        pytest.param(2880, 1000, "mxfp4", id="padded mxfp4"),
        pytest.param(1984, 200, "nf4", id="padded nf4"),
        pytest.param(12352, 1088, "nf4", id="nf4, K of several phases"),
        pytest.param(1152, 320, "fp4", id="fp4 in blocks of 128"),
    ],
)
SHAPES = [
    pytest.param(kind.tokens, kind.columns, kind.teams, id=f"{kind.tokens}-{kind.columns}-{kind.teams}")
    for kind in hopper_gemm.BLOCK_SHAPES
]
PER = pytest.mark.parametrize(
    "per", ["channel", "e5m2", "block", "int8", "mxfp8", "nvfp4", "mxfp4", "nf4", "fp4"]
)
FP4 = {"nvfp4": 16, "mxfp4": 32}  # inputs of a scale
TABLES = {"nf4": (64, [0, 7, 15]), "fp4": (128, [0, 3, 5, 7, 8, 11, 13, 15])}  # inputs; codes of exact values


@pytest.fixture(autouse=True, scope="module")
def _hopper() -> None:
    reason = cuda.why_not()
    if reason or torch.cuda.get_device_capability()[0] != launch.HOPPER:
        pytest.skip(reason or "needs Hopper")


def layer(
    K: int, N: int, per: str, *, exact: bool = False, seed: int = 0, device: str = "cuda"
) -> ByteStripsWeight:
    """Random values. `exact`: whole numbers of at most 4, and scales that are powers of two."""
    make = torch.Generator().manual_seed(K + N + seed)
    if per in FP4:
        return fp4_layer(K, N, per, make, exact).to(device)
    if per in TABLES:
        return table_layer(K, N, per, make, exact).to(device)
    if per == "mxfp8":
        return mxfp8_layer(K, N, make, exact).to(device)
    shape = {"tensor": (1,), "channel": (N, 1), "e5m2": (N, 1), "int8": (N,)}.get(
        per, (-(-N // 128), -(-K // 128))
    )
    scales = torch.rand(shape, generator=make) * 0.01 + 0.0001
    whole = torch.randint(-4, 5, (N, K), generator=make)
    if exact:
        scales = 2.0 ** torch.randint(-3, 1, shape, generator=make)
    if per == "int8":
        codes = whole if exact else torch.randint(-127, 128, (N, K), generator=make)
        stored = BNBWeight(config=BNBConfig(), weight=codes.to(torch.int8), SCB=127 * scales)
        return repack(stored, "strips").to(device)  # type: ignore[return-value]
    bytes_ = torch.randint(256, (N, K), generator=make)
    dtype, finite = (torch.float8_e5m2, 0x7C) if per == "e5m2" else (torch.float8_e4m3fn, 0x7F)
    values = torch.where(bytes_ & 0x7F >= finite, 0, bytes_).to(torch.uint8).view(dtype)
    if exact:
        values = whole.float().to(dtype)
    return fp8(values, scales, per).to(device)


def fp4_layer(K: int, N: int, per: str, make: torch.Generator, exact: bool) -> ByteStripsWeight:
    """All codes, and all scales that there are; exponents of an output within 2**24."""
    codes, shape = torch.randint(16, (N, K), generator=make), (N, K // FP4[per])
    stored: Any
    if per == "mxfp4":
        largest = torch.randint(114, 120, (N, 1), generator=make)
        stored = mxfp4(largest - torch.randint(3 if exact else 25, shape, generator=make), codes)
    else:
        bytes_ = torch.randint(0x7F, shape, generator=make).to(torch.uint8)
        scales = bytes_.view(torch.float8_e4m3fn).float()
        if exact:
            scales = 2.0 ** torch.randint(-3, 1, shape, generator=make)
        stored = nvfp4(scales, codes, 2.0**-9)
    return repack(stored, "strips")  # type: ignore[return-value]


def mxfp8_layer(K: int, N: int, make: torch.Generator, exact: bool) -> ByteStripsWeight:
    """All finite codes; exponents of an output within 2**21."""
    codes, largest = (
        torch.randint(256, (N, K), generator=make),
        torch.randint(114, 120, (N, 1), generator=make),
    )
    codes[codes & 0x7F == 0x7F] = 0
    if exact:
        codes = torch.randint(-4, 5, (N, K), generator=make).float().to(torch.float8_e4m3fn).view(torch.uint8)
    exponents = largest - torch.randint(3 if exact else 22, (N, K // 32), generator=make)
    return repack(mxfp8(exponents, codes), "strips")  # type: ignore[return-value]


def table_layer(
    K: int, N: int, per: str, make: torch.Generator, exact: bool, powers: bool = False
) -> ByteStripsWeight:
    """All codes, or those of exact values; `powers`: scales are powers of two, as those of `exact`."""
    blocksize, exact_codes = TABLES[per]
    codes = torch.randint(16, (N, K), generator=make)
    if exact:
        codes = torch.tensor(exact_codes)[codes % len(exact_codes)]
    absmax = torch.rand(N * K // blocksize, generator=make) * 0.01 + 0.0001
    if exact or powers:
        absmax = 2.0 ** torch.randint(-3, 1, absmax.shape, generator=make)
    return repack(bnb4(codes, absmax, per, blocksize), "strips")  # type: ignore[return-value]


def assert_within(run: Callable[[Tensor], Tensor], weight: Any, x: Tensor) -> None:
    """Assert the derived bound; kernels round scales and values of a table of 16 to x's dtype too."""
    if not isinstance(weight, TableStripsWeight):
        assert_within_bound(run, weight, x)
        return
    stored: Any = restore(weight)
    rounded = replace(stored, quant_map=stored.quant_map.to(x.dtype).float())
    assert_within_bound(run, rounded, x, scales=x.dtype)


def fp8(values: Tensor, scales: Tensor, per: str) -> Fp8StripsWeight:
    config = Fp8Config("block", (128, 128)) if per == "block" else Fp8Config()
    made = repack(Fp8Weight(config=config, weight=values, weight_scale=scales), "strips")
    assert isinstance(made, Fp8StripsWeight)
    return made


def call(x: Tensor, weight: ByteStripsWeight) -> ByteStripsCall:
    return ByteStripsCall(*arguments(x, weight))


def kernel(weight: ByteStripsWeight, name: str, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    return lambda x: cuda.linear(x, weight, bias, kernel=name)


@DTYPES
@LAYERS
def test_one_input_at_a_time_reads_the_weight_back(K: int, N: int, per: str, dtype: torch.dtype) -> None:
    weight = layer(K, N, per)
    if per in TABLES:  # whose products are rounded only once
        weight = table_layer(K, N, per, torch.Generator().manual_seed(K), exact=False, powers=True).to("cuda")

    def in_pieces(x: Tensor) -> Tensor:  # eight tokens, sixteen, and as many as there may be
        pieces = (*x[:64].split(8), *x[64:128].split(16), *x[128:].split(MAX_DECODED))
        return torch.cat([kernel(weight, "decode")(each) for each in pieces])

    assert_reads_back(in_pieces, weight, dtype)
    exact = weight if per != "block" else layer(K, N, per, exact=True)  # sums are scaled from block to block
    assert_reads_back(kernel(exact, "many"), exact, dtype)


@DTYPES
@LAYERS
@pytest.mark.parametrize("M", [1, 7, 8, 9, 16, 17, 23, 24])
def test_few_tokens_sum_exactly_and_within_what_rounding_costs(
    K: int, N: int, per: str, M: int, dtype: torch.dtype
) -> None:
    exact, rounded = layer(K, N, per, exact=True), layer(K, N, per)

    assert_sums_exactly(kernel(exact, "decode"), exact, dtype, M=M)
    assert_within(kernel(rounded, "decode"), rounded, inputs(M, rounded, dtype))


@DTYPES
@LAYERS
@pytest.mark.parametrize("M", [1, 17, 31, 32, 33, 63, 64, 65, 96, 97, 128, 129, 192, 255, 256, 257, 300])
def test_many_tokens_sum_exactly_and_within_what_rounding_costs(
    K: int, N: int, per: str, M: int, dtype: torch.dtype
) -> None:
    exact, rounded = layer(K, N, per, exact=True), layer(K, N, per)

    assert_sums_exactly(kernel(exact, "many"), exact, dtype, M=M)
    assert_within(kernel(rounded, "many"), rounded, inputs(M, rounded, dtype))


@DTYPES
@PER
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("M", [5, 16, 24])
def test_every_division_for_few_tokens_sums_exactly(
    M: int, split: int, columns: int, per: str, dtype: torch.dtype
) -> None:
    weight = layer(2048, 576, per, exact=True)

    assert_sums_exactly(lambda x: decode.run(call(x, weight), columns, split), weight, dtype, M=M)


@DTYPES
@PER
@pytest.mark.parametrize(("tokens", "columns", "teams"), SHAPES)
@pytest.mark.parametrize("two", ["alone", "pairs", "neighbours", "both"])
@pytest.mark.parametrize(("K", "slices"), [(1920, 1), (1920, 2), (1920, 7), (256, 1)])
def test_every_division_for_many_tokens_sums_exactly_and_gives_the_same_bits_again(
    tokens: int, columns: int, teams: int, two: str, K: int, slices: int, per: str, dtype: torch.dtype
) -> None:
    pairs, neighbours = two in ("pairs", "both"), two in ("neighbours", "both")
    how = ManyDivision(tokens, columns, pairs, slices, neighbours, teams)
    bits = 4 if per in {**FP4, **TABLES} else 8
    if (teams > 1 and neighbours) or (two == "both" and slices > 1) or how.parts * STAGE > K:
        pytest.skip("no launch divides a layer so")
    if bits not in hopper_gemm.KINDS[tokens, columns, teams].stages:
        pytest.skip("no kernel of these bits has such a block")
    weight = layer(K, 832, per, exact=True)
    wide, places = (columns, PLACES) if two == "alone" else (2 * columns, PLACES // 2)
    tall = places // -(-832 // wide) + 2  # some tiles of a second turn
    counts = (1, tokens // 2 + 3, tokens, 3 * tokens - 5) if K > 256 else (tall * tokens - 3, tall * tokens)

    for M in counts:
        assert_sums_exactly(lambda x: hopper_gemm.run(call(x, weight), how), weight, dtype, M=M)
        x = inputs(M, weight, dtype)
        assert_same_bits(hopper_gemm.run(call(x, weight), how), hopper_gemm.run(call(x, weight), how))


@DTYPES
@pytest.mark.parametrize("per", ["channel", "block"])
@pytest.mark.parametrize(
    ("M", "name"), [(1, "decode"), (9, "decode"), (24, "decode"), (3, "many"), (65, "many")]
)
def test_a_code_without_a_number_is_none_in_its_output_alone(
    M: int, name: str, per: str, dtype: torch.dtype
) -> None:
    weight = layer(640, 192, per)
    bytes_ = weight.codes().plain().to(torch.uint8)
    bytes_[70, 333], bytes_[129, 0] = 0x7F, 0xFF
    made = fp8(bytes_.view(torch.float8_e4m3fn), weight.weight_scale, per)

    y = kernel(made, name)(inputs(M, weight, dtype))

    assert y.isnan().any(0).nonzero().flatten().tolist() == [70, 129]
    assert bool(y[:, [70, 129]].isnan().all())


@DTYPES
@pytest.mark.parametrize(("M", "name"), [(5, "decode"), (40, "many")])
@pytest.mark.parametrize("power", [-100, -40, 0, 20])
def test_every_size_of_scales_is_multiplied_right(power: int, M: int, name: str, dtype: torch.dtype) -> None:
    weight = layer(1024, 192, "block", exact=True)
    each = replace(weight, scales=weight.scales * 2.0**power)
    x = torch.ones(M, 1024, dtype=dtype, device="cuda") * 2.0**-8
    x[:, ::3] = 0
    want = (x.double() @ each.dequantize().double().T).to(dtype)

    assert_same_bits(kernel(each, name)(x) + 0, want + 0)


@DTYPES
@pytest.mark.parametrize(("M", "name"), [(6, "decode"), (33, "many")])
def test_scales_of_blocks_may_be_far_apart(M: int, name: str, dtype: torch.dtype) -> None:
    weight = layer(2560, 320, "block")
    make = torch.Generator(device="cuda").manual_seed(M)
    powers = torch.randint(-40, 1, weight.scales.shape, device="cuda", generator=make)
    far = replace(weight, scales=weight.scales * 2.0**powers)

    assert_within(kernel(far, name), far, inputs(M, far, dtype))


@DTYPES
@pytest.mark.parametrize(("M", "name"), [(1, "decode"), (9, "decode"), (20, "decode"), (33, "many")])
@pytest.mark.parametrize("kind", [CTNVFP4Weight, ModelOptNVFP4Weight], ids=lambda kind: kind.format)
def test_second_scales_of_any_size_differ_between_fused_parts(
    kind: Any, M: int, name: str, dtype: torch.dtype
) -> None:
    make = torch.Generator().manual_seed(M)
    scales = torch.randint(0x7F, (320, 40), generator=make).to(torch.uint8).view(torch.float8_e4m3fn)
    second = [317.3, 0.0371, 2.9e-5]
    parts = Layer((64, 160, 96), 640, (320, 640), "qkv")
    stored = nvfp4(scales.float(), torch.randint(16, (320, 640), generator=make), second, kind, layer=parts)
    weight: Any = repack(stored, "strips").to("cuda")

    x = inputs(M, weight, dtype) * 2.0**-12  # sums of the largest parts fit float16
    assert_within(kernel(weight, name), weight, x)


@pytest.mark.parametrize(("M", "name"), [(5, "decode"), (17, "decode"), (70, "many")])
@pytest.mark.parametrize("largest", [30, 100, 160, 200])
def test_mxfp4_has_exponents_of_every_size(largest: int, M: int, name: str) -> None:
    make = torch.Generator().manual_seed(largest)
    exponents = largest + torch.randint(-24, 1, (192, 20), generator=make)
    exponents[torch.rand(192, 20, generator=make) < 0.2] = 0  # 2**-127, and 0 beside larger ones
    weight: Any = repack(mxfp4(exponents, torch.randint(16, (192, 640), generator=make)), "strips").to("cuda")

    assert_within(kernel(weight, name), weight, inputs(M, weight, torch.bfloat16))


@DTYPES
@pytest.mark.parametrize("power", [-80, -20, 0])
@pytest.mark.parametrize(("M", "name"), [(5, "decode"), (17, "decode"), (70, "many")])
@pytest.mark.parametrize("per", TABLES)
def test_absmax_of_every_size_within_an_output(
    per: str, M: int, name: str, power: int, dtype: torch.dtype
) -> None:
    make = torch.Generator().manual_seed(M)
    blocksize = TABLES[per][0]
    absmax = 2.0 ** (torch.rand(192 * (640 // blocksize), generator=make) * -19.0 + power)
    absmax[torch.rand(absmax.shape, generator=make) < 0.1] = 0
    stored = bnb4(torch.randint(16, (192, 640), generator=make), absmax, per, blocksize)
    weight: Any = repack(stored, "strips").to("cuda")

    assert_within(kernel(weight, name), weight, inputs(M, weight, dtype))


@DTYPES
@PER
@pytest.mark.parametrize(("M", "name"), [(1, "decode"), (24, "decode"), (65, "many")])
def test_a_bias_is_added_before_the_one_rounding(M: int, name: str, per: str, dtype: torch.dtype) -> None:
    weight = layer(1024, 256, per, exact=True)
    x, bias = inputs(M, weight, dtype).round(), torch.arange(256, device="cuda").to(dtype) / 8

    got = kernel(weight, name, bias)(x)

    wide = x.double() @ weight.dequantize().double().T + bias.double()
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@PER
@pytest.mark.parametrize("M", [1, 16, 17, 100])
def test_a_module_takes_the_kernels_and_a_graph_repeats_their_bits(M: int, per: str) -> None:
    weight = layer(2048, 512, per)
    module, x = weight.get_linear(), inputs(M, weight, torch.bfloat16)
    first = module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [module(x) for _ in range(10)]
    for _ in range(3):
        graph.replay()
        for each in captured:
            assert_same_bits(each, first)

    assert_same_bits(first, cuda.linear(x, weight))
    assert_within(module, weight, x)


@pytest.mark.parametrize("M", [3, 257])
@pytest.mark.parametrize("per", ["block", "mxfp4"])
def test_a_compiled_model_calls_it_whole(per: str, M: int) -> None:
    weight = layer(1024, 256, per)
    x = inputs(M, weight, torch.float16)

    torch.library.opcheck(torch.ops.qload.byte_strips.default, arguments(x, weight))
    compiled = torch.compile(lambda x: cuda.linear(x, weight) * 2, fullgraph=True, backend="eager")
    assert_same_bits(compiled(x), cuda.linear(x, weight) * 2)


@pytest.mark.parametrize("per", ["channel", "nvfp4", "mxfp4", "nf4"])
def test_a_weight_between_two_multiples_of_16_bytes_is_dequantized(per: str) -> None:
    weight = layer(256, 128, per)
    memory = torch.empty(weight.qweight.numel() + 1, dtype=torch.int32, device="cuda")
    moved = memory[1:].view(weight.qweight.shape)
    moved.copy_(weight.qweight)
    x, held = inputs(4, weight, torch.float16), weight.holding({"qweight": moved})

    for each in (decode, hopper_gemm):
        assert "multiples of 16 bytes" in str(each.why_not(call(x, held)))
    assert_within(lambda x: cuda.linear(x, held), held, x)


def test_other_types_of_activations_are_refused_with_a_reason() -> None:
    weight: Any = layer(128, 64, "channel")

    assert "float16 or bfloat16" in str(cuda.why_not_linear(weight, torch.float32))
    assert_within(weight.get_linear(), weight, inputs(3, weight, torch.float32))
