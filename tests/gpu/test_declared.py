"""Declared inputs of layers in strips: bounds, graphs, Inductor, hostile inputs, one launch ahead."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.kernels import cuda, plans, scaled
from qload.kernels.bounds import excess, of_linear
from qload.kernels.cuda import launch
from qload.kernels.cuda.linear import CudaPlan
from qload.spec import ActivationScheme, Weight
from qload.testing import assert_same_bits
from tests.gpu.layers import DTYPES, inputs
from tests.gpu.layers import layer as integers
from tests.gpu.replays import assert_replays
from tests.gpu.test_byte_strips import layer as bytes_
from tests.gpu.test_quantize import SCHEMES

pytestmark = pytest.mark.gpu
TOKENS = (1, 3, 16, 17, 64, 65, 256, 300, 2048)
LAYERS = {
    "fp8 blocks": lambda dtype: bytes_(1024, 448, "block"),
    "fp8 channel": lambda dtype: bytes_(1024, 448, "channel"),
    "fp8 e5m2": lambda dtype: bytes_(1024, 448, "e5m2"),
    "mxfp8": lambda dtype: bytes_(1024, 448, "mxfp8"),
    "fp4 with scales of 16": lambda dtype: bytes_(1024, 448, "nvfp4"),
    "fp4 with scales of 32": lambda dtype: bytes_(1024, 448, "mxfp4"),
    "int8": lambda dtype: bytes_(1024, 448, "int8"),
    "4 bits": lambda dtype: integers(1024, 448, 128, dtype=dtype, layout="strips"),
    "4 bits with zeros": lambda dtype: integers(1024, 448, 32, True, dtype=dtype, layout="strips"),
}
CASES = [
    pytest.param(kind, name, id=f"{kind}, {name}")
    for kind, name in product(LAYERS, SCHEMES)
    if kind.startswith(("fp", "int8")) or not SCHEMES[name].scale
]
FEW_IDS = (
    "fp8 blocks, fp8 group",
    "fp8 blocks, mxfp8",
    "fp8 channel, fp8 token",
    "fp8 channel, fp8 static",
    "fp8 channel, fp8 tensor",
    "fp4 with scales of 16, nvfp4",
    "fp4 with scales of 32, mxfp4",
    "mxfp8, mxfp8",
    "int8, int8 asymmetric",
    "4 bits, int8 token",
)
FEW = [case for case in CASES if case.id in FEW_IDS]


@pytest.fixture(autouse=True, scope="module")
def _hopper() -> None:
    reason = cuda.why_not()
    if reason or torch.cuda.get_device_capability()[0] != launch.HOPPER:
        pytest.skip(reason or "needs Hopper")


def declared(kind: str, name: str, dtype: torch.dtype) -> Any:
    weight, scheme = LAYERS[kind](dtype), SCHEMES[name]
    changed: dict[str, Any] = {"layer": replace(weight.layer, activations=scheme)}
    if scheme.scale:
        changed["input_scale"] = torch.tensor([0.0173], device="cuda")
    return replace(weight, **changed)


def assert_within(y: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    __tracebackhide__ = True
    assert y.dtype == x.dtype
    off = excess(y, of_linear(x, weight, bias))
    assert bool((off <= 1).all()), f"{float(off.nan_to_num(torch.inf).max()):g} times the bound"


@DTYPES
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_number_of_tokens_is_within_the_bound_of_declared_inputs(
    kind: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = declared(kind, name, dtype)
    bias = torch.randn(448, device="cuda").to(dtype)
    module, biased = weight.get_linear(), weight.get_linear(bias)
    slow = scaled.multiply
    for M in TOKENS:
        x = inputs(M, weight, dtype)
        monkeypatch.setattr(scaled, "multiply", None)  # plans alone
        y, z = module(x), biased(x)
        monkeypatch.setattr(scaled, "multiply", slow)
        assert_within(y, x, weight)
        assert_within(z, x, weight, bias)
        assert_same_bits(plans.multiply(x, weight), y)
        assert_same_bits(module(x.view(1, M, -1))[0], y)


@DTYPES
@pytest.mark.parametrize(("kind", "name"), FEW)
def test_hostile_inputs_are_within_the_bound_too(kind: str, name: str, dtype: torch.dtype) -> None:
    weight, own = declared(kind, name, dtype), torch.finfo(dtype)
    if kind.startswith(("fp8", "4 bits")):  # whose values follow from these scales: results fit float16
        weight = replace(weight, scales=weight.scales * 2.0**-8)
    module, make = weight.get_linear(), torch.Generator(device="cuda").manual_seed(1)
    signs = torch.randint(0, 2, (24, 1024), device="cuda", generator=make) * 2 - 1
    x = signs.to(dtype) * torch.logspace(-7, 4, 24, device="cuda")[:, None].to(dtype)
    x[1], x[2, ::3], x[3] = 0, 0, -0.0
    x[4] = own.smallest_normal * signs[4]
    x[5] = 65504 * signs[5]  # in e4m3 256 times a scale of 256 in powers of two: beyond float16
    x[6, ::2], x[6, 1::2] = 65504, own.smallest_normal
    for rows in (x, x[:1], x.repeat(5, 1)):
        assert_within(module(rows), rows, weight)


@DTYPES
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("kind", "name"), FEW)
@pytest.mark.parametrize("M", [5, 70])
def test_what_is_no_number_spoils_its_own_token(
    M: int, kind: str, name: str, value: float, dtype: torch.dtype
) -> None:
    weight = declared(kind, name, dtype)
    x = inputs(M, weight, dtype)
    x[3, 77] = value

    y = weight.get_linear()(x)

    others = torch.arange(M, device="cuda") != 3
    if SCHEMES[name].dynamic is True:
        assert not bool(y[3].isfinite().any())
    else:  # a stored scale, and one of e4m3, saturates infinity; NaN stays
        assert bool(y[3].isnan().all()) == (value != value)
    assert bool(y[others].isfinite().all()) == (not SCHEMES[name].covers_all_tokens)


@pytest.mark.parametrize(("kind", "name"), FEW)
@pytest.mark.parametrize("M", [1, 16, 100])
def test_a_chain_of_layers_repeats_its_bits_in_a_graph(M: int, kind: str, name: str) -> None:
    weight = LAYERS[kind](torch.bfloat16)
    square = bytes_(1024, 1024, "block" if "blocks" in kind else "channel")
    scheme = SCHEMES[name]
    if scheme.scale:
        square = replace(square, input_scale=torch.tensor([0.0173], device="cuda"))
    square = replace(square, layer=replace(square.layer, activations=scheme))
    middle, last = square.get_linear(), declared(kind, name, torch.bfloat16).get_linear()
    x = inputs(M, weight, torch.bfloat16)

    def chain() -> Tensor:
        y = x
        for _ in range(6):  # each rounds what the one before has written
            y = middle(y) * 0.125
        y = torch.nn.functional.layer_norm(middle(middle(y)), (1024,))
        z: Tensor = last(y)
        return z

    assert_replays(chain)


@pytest.mark.filterwarnings("ignore")  # of what torch generates and imports
@pytest.mark.parametrize(("kind", "name"), FEW)
def test_inductor_compiles_a_module_as_one_graph(kind: str, name: str) -> None:
    weight = declared(kind, name, torch.float16)
    module = weight.get_linear()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True)
    for M in (1, 40):
        x = inputs(M, weight, torch.float16)
        assert_same_bits(compiled(x), module(x))


@pytest.mark.filterwarnings("ignore")  # of the profiler
def test_rounding_is_one_launch_ahead_of_the_undeclared_call() -> None:
    weight = declared("fp8 blocks", "fp8 group", torch.float16)
    x = inputs(4, weight, torch.float16)
    names = []
    for activations in ("declared", "unquantized"):
        module = weight.get_linear(activations=activations)
        module(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            module(x)
            torch.cuda.synchronize()
        names.append([event.key for event in seen.key_averages() if event.device_time_total])

    assert len(names[0]) == len(names[1]) + 1
    assert [name for name in names[0] if name not in names[1]] == [
        name for name in names[0] if "quantize_tokens" in name
    ]


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_stored_scales_have_any_float_type(stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = declared("fp8 channel", "fp8 static", torch.float16)
    narrow = replace(weight, input_scale=weight.input_scale.to(stored))
    x = inputs(7, weight, torch.float16)
    monkeypatch.setattr(scaled, "multiply", None)  # plans alone

    assert_within(narrow.get_linear()(x), x, narrow)


@pytest.mark.parametrize("M", [1, 17, 300])
def test_int8_has_a_stored_scale_and_zero_point(M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight: Any = LAYERS["int8"](torch.float16)
    scheme = ActivationScheme(
        "int", 8, False, "tensor", symmetric=False, scale="input_scale", zero_point="input_zero_point"
    )
    static = replace(
        weight,
        layer=replace(weight.layer, activations=scheme),
        input_scale=torch.tensor([0.0173], dtype=torch.bfloat16, device="cuda"),
        input_zero_point=torch.tensor([-37], dtype=torch.int8, device="cuda"),
    )
    x = inputs(M, static, torch.float16)
    monkeypatch.setattr(scaled, "multiply", None)  # plans alone

    assert_within(static.get_linear()(x), x, static)


def test_factors_of_inputs_and_fused_scales_keep_their_meaning() -> None:
    weight = declared("fp8 channel", "fp8 static", torch.float16)
    layer = replace(weight.layer, parts=(192, 256))
    fused = replace(weight, layer=layer, input_scale=torch.tensor([0.0173, 0.05], device="cuda"))
    x = inputs(9, weight, torch.float16)

    assert_within(fused.get_linear()(x), x, fused)


def test_every_scheme_of_the_table_is_one_that_plans_take() -> None:
    weight = LAYERS["fp8 channel"](torch.float16)
    for name, scheme in SCHEMES.items():
        assert isinstance(scheme, ActivationScheme)
        each = declared("fp8 channel", name, torch.float16)
        x = inputs(1, weight, torch.float16)
        module: Any = each.get_linear()
        assert isinstance(module._call.signature.plan(x, None, list(each.fields().values())), CudaPlan)
