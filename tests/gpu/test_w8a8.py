"""Codes of both sides in strips: exact sums in every division, borders, promoted sums, NaN, bits, graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.kernels import cuda
from qload.kernels.bounds import excess, of_linear
from qload.kernels.cuda import hopper_gemm, launch, w8a8
from qload.kernels.cuda.byte_strips import ByteStripsCall, arguments
from qload.kernels.cuda.hopper_gemm import PLACES, STAGE, ManyDivision
from qload.spec import ActivationScheme
from qload.testing import assert_same_bits, assert_sums_exactly
from tests.gpu.layers import DTYPES, inputs
from tests.gpu.test_byte_strips import fp8, layer
from tests.gpu.test_declared import assert_within
from tests.gpu.test_quantize import SCHEMES

pytestmark = pytest.mark.gpu
BORDERS = (1, 16, 17, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 600)
LAYERS = pytest.mark.parametrize(
    ("K", "N", "per"),
    [
        pytest.param(128, 64, "channel", id="one unit"),
        pytest.param(1024, 256, "tensor", id="one scale"),
        pytest.param(1000, 200, "channel", id="a scale an output, padded"),
        pytest.param(1144, 320, "int8", id="int8, K of no whole 32"),
        pytest.param(1000, 1001, "block", id="padded blocks"),
        pytest.param(12352, 1088, "block", id="K of several phases"),
        pytest.param(12352, 1088, "int8", id="int8, K of several phases"),
    ],
)
PER = pytest.mark.parametrize("per", ["channel", "block", "int8"])
SHAPES = pytest.mark.parametrize(
    "tokens", [kind.tokens for kind in hopper_gemm.BLOCK_SHAPES if hopper_gemm.E4M3_CODES in kind.stages]
)


@pytest.fixture(autouse=True, scope="module")
def _hopper() -> None:
    reason = cuda.why_not()
    if reason or torch.cuda.get_device_capability()[0] != launch.HOPPER:
        pytest.skip(reason or "needs Hopper")


def kind_of(per: str) -> str:
    return "int8" if per == "int8" else "fp8"


def declared(K: int, N: int, per: str, name: str) -> Any:
    weight, scheme = layer(K, N, per), SCHEMES[name]
    changed: dict[str, Any] = {"layer": replace(weight.layer, activations=scheme)}
    if scheme.scale:
        changed["input_scale"] = torch.tensor([0.0173], device="cuda")
    return replace(weight, **changed)


def coded(x: Tensor, weight: Any, bias: Tensor | None = None, how: ManyDivision | None = None) -> Tensor:
    """Product by the scheme of a layer."""
    stored = weight.fields().get("input_scale")
    read = arguments(x, weight, bias)
    return w8a8.run(ByteStripsCall(*read, scheme=weight.layer.activations, stored=stored), how)


def as_they_are(x: Tensor, weight: Any, how: ManyDivision | None = None) -> Tensor:
    """Product of inputs that are their own codes: a stored scale of 1."""
    whole = w8a8.TYPES[arguments(x, weight)[-2]]
    scheme = ActivationScheme(whole, 8, False, "tensor", scale="input_scale")  # type: ignore[arg-type]
    one = torch.ones(1, device="cuda")
    return w8a8.run(ByteStripsCall(*arguments(x, weight), scheme=scheme, stored=one), how)


@DTYPES
@PER
@SHAPES
@pytest.mark.parametrize("two", ["alone", "pairs", "neighbours", "both"])
@pytest.mark.parametrize(("K", "slices"), [(1920, 1), (1920, 2), (1920, 7), (256, 1)])
def test_every_division_sums_exactly_and_gives_the_same_bits_again(
    tokens: int, two: str, K: int, slices: int, per: str, dtype: torch.dtype
) -> None:
    pairs, neighbours = two in ("pairs", "both"), two in ("neighbours", "both")
    how = ManyDivision(tokens, 128, pairs, slices, neighbours)
    if (two == "both" and slices > 1) or how.parts * STAGE > K:
        pytest.skip("no launch divides a layer so")
    weight = layer(K, 832, per, exact=True)
    wide, places = (128, PLACES) if two == "alone" else (256, PLACES // 2)
    tall = places // -(-832 // wide) + 2  # some tiles of a second turn
    counts = (1, tokens // 2 + 3, tokens, 3 * tokens - 5) if K > 256 else (tall * tokens - 3, tall * tokens)

    for M in counts:
        assert_sums_exactly(lambda x: as_they_are(x, weight, how), weight, dtype, M=M)
        x = inputs(M, weight, dtype)
        assert_same_bits(as_they_are(x, weight, how), as_they_are(x, weight, how))


@DTYPES
@LAYERS
def test_every_border_is_within_the_bound_of_declared_inputs(
    K: int, N: int, per: str, dtype: torch.dtype
) -> None:
    for name in (f"{kind_of(per)} token", f"{kind_of(per)} tensor"):
        weight = declared(K, N, per, name)
        bias = torch.randn(N, device="cuda").to(dtype)
        for M in BORDERS:
            x = inputs(M, weight, dtype)
            assert_within(coded(x, weight), x, weight)
            assert_within(coded(x, weight, bias), x, weight, bias)


@DTYPES
@pytest.mark.parametrize("per", ["channel", "block"])
@SHAPES
def test_sums_are_promoted_before_they_lose_bits(tokens: int, per: str, dtype: torch.dtype) -> None:
    """Products of one sign: a sum of all by the matrix unit would lose what is 2**13 times smaller."""
    weight = declared(16384, 192, per, "fp8 token")
    scales = weight.scales / weight.scales * 2.0**-14
    positive = replace(weight, qweight=weight.qweight & 0x77777777, scales=scales)
    x = torch.rand(tokens, 16384, device="cuda", dtype=dtype) + 0.5
    how = ManyDivision(tokens, 128, False, 1)

    off = excess(coded(x, positive, how=how), of_linear(x, positive))

    assert bool((off <= 1).all()), f"{float(off.max()):g} times the bound"


@DTYPES
@pytest.mark.parametrize("per", ["channel", "block"])
def test_a_code_without_a_number_is_none_in_its_output_alone(per: str, dtype: torch.dtype) -> None:
    weight = layer(640, 192, per)
    bytes_ = weight.codes().plain().to(torch.uint8)
    bytes_[70, 333], bytes_[129, 0] = 0x7F, 0xFF
    made = fp8(bytes_.view(torch.float8_e4m3fn), weight.weight_scale, per)
    spoiled = replace(made, layer=replace(made.layer, activations=SCHEMES["fp8 token"]))

    y = coded(inputs(65, weight, dtype), spoiled)

    assert y.isnan().any(0).nonzero().flatten().tolist() == [70, 129]
    assert bool(y[:, [70, 129]].isnan().all())


@DTYPES
@PER
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_spoils_its_own_token(value: float, per: str, dtype: torch.dtype) -> None:
    weight = declared(1024, 448, per, f"{kind_of(per)} token")
    x = inputs(70, weight, dtype)
    x[3, 77] = value

    y = coded(x, weight)

    assert not bool(y[3].isfinite().any())
    assert bool(y[torch.arange(70, device="cuda") != 3].isfinite().all())


@pytest.mark.filterwarnings("ignore")  # of the profiler
@pytest.mark.parametrize("name", ["fp8 token", "fp8 tensor", "fp8 static", "fbgemm", "int8 token"])
def test_modules_take_codes_from_some_number_of_tokens_on(name: str) -> None:
    weight = declared(2048, 2048, "int8" if name.startswith("int8") else "channel", name)
    module, x = weight.get_linear(), inputs(256, weight, torch.bfloat16)
    y = module(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        module(x)
        torch.cuda.synchronize()

    assert any("w8a8_kernel" in event.key for event in seen.key_averages())
    assert_same_bits(y, coded(x, weight))


@pytest.mark.parametrize(
    ("per", "name", "reason"),
    [
        ("channel", "fp8 group", "groups of 128"),
        ("channel", "int8 token", "no codes of the type"),
        ("int8", "int8 asymmetric", "no codes of the type"),
        ("nvfp4", "fp8 token", "no codes of the type"),
    ],
)
def test_other_inputs_are_refused_with_a_reason(per: str, name: str, reason: str) -> None:
    weight = layer(1024, 448, per)
    call = ByteStripsCall(*arguments(inputs(65, weight, torch.float16), weight), scheme=SCHEMES[name])

    assert reason in str(w8a8.why_not(call))
    assert "not quantized" in str(w8a8.why_not(replace(call, scheme=None)))
