"""Declared inputs before kernels of strips: one launch ahead, the kernel of the undeclared call, one bound.

The CUDA module is computed by hand on memory of the CPU.
"""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels import plans
from qload.kernels.bounds import exact, excess, of_linear
from qload.kernels.cuda.linear import CudaPlan, multiply_rounded, plan_of
from qload.kernels.plans import signature_of
from qload.spec import ActivationScheme, Layer
from tests.kernels.cuda_by_hand import STREAM
from tests.kernels.cuda_layers import _operators, byte_layer, installed, layer
from tests.kernels.cuda_quantize import HandOfInputs

pytestmark = pytest.mark.usefixtures("seen_texts")

__all__ = ["_operators"]  # a fixture
CUDA_LINEAR = import_module("qload.kernels.cuda.linear")  # whose name a function of the package has, too
HOPPER = pytest.mark.parametrize("chip", [(9, 0)], ids=["9.0"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
K, N = 256, 72
SCHEMES = {
    "fp8 token": ActivationScheme("float", 8, True, "token"),
    "fp8 tensor": ActivationScheme("float", 8, True, "tensor"),
    "fp8 static": ActivationScheme("float", 8, False, "tensor", scale="input_scale"),
    "int8 static": ActivationScheme("int", 8, False, "tensor", scale="input_scale"),
    "fp8 group": ActivationScheme("float", 8, True, "group", 128, owner="transformers"),
    "int8 token": ActivationScheme("int", 8, True, "token"),
    "int8 asymmetric": ActivationScheme("int", 8, True, "token", symmetric=False),
    "int8 group": ActivationScheme("int", 8, True, "group", 64, symmetric=False),
    "mxfp8": ActivationScheme("float", 8, True, "group", 32, scale_type="e8m0", owner="modelopt"),
    "mxfp4": ActivationScheme("float", 4, True, "group", 32, scale_type="e8m0"),
    "nvfp4": ActivationScheme(
        "float", 4, "local", "tensor_group", 16, scale="input_scale", scale_type="e4m3"
    ),
}
LAYERS = {
    "4 bits": lambda dtype: layer(K, N, 64, 4, dtype, "strips", zeros=True),
    "fp8 blocks": lambda dtype: byte_layer(K, N, "block"),
    "fp8 channel": lambda dtype: byte_layer(K, N, "channel"),
    "fp8 e5m2": lambda dtype: byte_layer(K, N, "e5m2"),
    "int8": lambda dtype: byte_layer(K, N, "int8"),
    "mxfp8": lambda dtype: byte_layer(K, N, "mxfp8"),
    "fp4": lambda dtype: byte_layer(K, N, "nvfp4"),
}
FP8 = ("fp8 token", "fp8 tensor", "fp8 static")
CODED = {"fp8 blocks": FP8, "fp8 channel": FP8, "int8": ("int8 token",)}  # multiplied as codes of 8 bits
every_layer = pytest.mark.parametrize("kind", LAYERS)
CASES = [
    (kind, name)
    for kind in LAYERS
    for name in SCHEMES
    if kind.startswith(("fp", "int8")) or not SCHEMES[name].scale
]


def declared(kind: str, name: str, dtype: torch.dtype) -> Any:
    """A layer in strips with a declared scheme and its stored scale."""
    weight, scheme = LAYERS[kind](dtype), SCHEMES[name]
    changed = {"layer": replace(weight.layer, activations=scheme)}
    if scheme.scale:
        changed["input_scale"] = torch.tensor([0.0173])
    return replace(weight, **changed)


def inputs(M: int, dtype: torch.dtype) -> Tensor:
    """Tokens of sizes far apart, one of zeros."""
    make = torch.Generator().manual_seed(M)
    x = torch.randn(M, K, generator=make) * 2.0 ** torch.randint(-9, 9, (M, 1), generator=make)
    x[M // 2] *= M == 1
    return x.to(dtype)


@pytest.fixture
def hand(chip: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> HandOfInputs:
    return installed(HandOfInputs(chip), monkeypatch)


@pytest.fixture
def plan(hand: HandOfInputs, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return plans of layers on the CPU that say they lie on CUDA."""
    monkeypatch.setattr(CUDA_LINEAR, "why_not_linear", lambda weight, dtype: None)
    monkeypatch.setattr(CUDA_LINEAR, "raw_stream", lambda index: STREAM)
    monkeypatch.setattr(CUDA_LINEAR, "current_device", lambda: None)  # the index of a CPU

    def made(weight: Any, dtype: torch.dtype) -> CudaPlan:
        found = plan_of(weight, dtype, weight.activations)
        assert found is not None
        return found

    return made


@HOPPER
@DTYPES
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_declared_inputs_are_rounded_ahead_of_the_kernel_of_the_undeclared_call(
    hand: HandOfInputs, plan: Any, kind: str, name: str, dtype: torch.dtype
) -> None:
    weight = declared(kind, name, dtype)
    made, plain = plan(weight, dtype), plan_of(weight, dtype)
    assert plain is not None
    tensors, bias = list(weight.fields().values()), torch.arange(N).to(dtype)
    for M in (1, 16, 65):
        for added in (None, bias):
            x = inputs(M, dtype)
            hand.called.clear()
            plain.multiply(x, added, tensors)
            undeclared = list(hand.called)
            hand.called.clear()

            y = made.multiply(x, added, tensors)

            assert y is not None
            kernels = ["w8a8"] if M == 65 and name in CODED.get(kind, ()) else undeclared
            assert hand.called == ["quantize", *kernels]
            assert bool((excess(y, of_linear(x, weight, added)) <= 1).all())
            shaped = made.multiply(x.view(1, M, K), added, tensors)
            assert torch.equal(shaped, y[None])


@HOPPER
@DTYPES
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_scales_and_zero_points_keep_their_types(
    hand: HandOfInputs, plan: Any, stored: torch.dtype, dtype: torch.dtype
) -> None:
    weight = declared("int8", "int8 static", dtype)
    scheme = replace(weight.activations, symmetric=False, zero_point="input_zero_point")
    static = replace(
        weight,
        layer=replace(weight.layer, activations=scheme),
        input_scale=torch.tensor([0.0173]).to(stored),
        input_zero_point=torch.tensor([-37], dtype=torch.int8),
    )
    x = inputs(16, dtype)

    y = plan(static, dtype).multiply(x, None, list(static.fields().values()))

    assert hand.called[0] == "quantize"
    assert bool((excess(y, of_linear(x, static)) <= 1).all())


@HOPPER
@DTYPES
@pytest.mark.parametrize("name", ["mxfp8", "fp8 group", "fp8 static", "fp8 tensor", "int8 token"])
def test_values_beyond_the_range_of_float16_are_no_infinity(plan: Any, name: str, dtype: torch.dtype) -> None:
    """65504 / 256 rounds to 256 in e4m3, whose value 65536 float16 has no number for."""
    weight, x = declared("fp8 blocks", name, dtype), torch.zeros(3, K, dtype=dtype)
    x[0, :8] = 65504
    x[1, ::2], x[1, 1::2] = 65504, 6e-8  # the least of float16 beside its largest
    x[2, 3] = min(1e37, torch.finfo(dtype).max)
    weight = replace(weight, scales=weight.scales * 2.0**-24)
    if name == "fp8 static":
        weight = replace(weight, input_scale=torch.tensor([1e6]))

    y = plan(weight, dtype).multiply(x, None, list(weight.fields().values()))

    assert bool(y.isfinite().all())
    assert bool((excess(y, of_linear(x, weight)) <= 1).all())


@HOPPER
@pytest.mark.parametrize("name", ["fp8 token", "int8 token", "fp8 group", "mxfp4"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_spoils_its_own_token(plan: Any, name: str, value: float) -> None:
    weight, x = declared("fp8 channel", name, torch.bfloat16), inputs(5, torch.bfloat16)
    x[3, 77] = value

    y = plan(weight, torch.bfloat16).multiply(x, None, list(weight.fields().values()))

    assert not bool(y[3].isfinite().any())
    assert bool(y[[0, 1, 2, 4]].isfinite().all())


@HOPPER
@DTYPES
@every_layer
def test_a_call_without_a_plan_takes_the_same_kernel(
    hand: HandOfInputs, plan: Any, kind: str, dtype: torch.dtype
) -> None:
    weight, x = declared(kind, "int8 token", dtype), inputs(17, dtype)
    factors = 2.0 ** -torch.arange(17.0)

    y = multiply_rounded(x, factors, weight, None)

    want = of_linear(x, weight, activations="unquantized") * exact(factors[:, None])
    assert y is not None
    assert bool((excess(y, want) <= 1).all())
    assert hand.called == ["many" if kind == "4 bits" else "decode"]
    assert multiply_rounded(x[:0], factors[:0], weight, None) is None
    with pytest.raises(ArgumentError, match="token_scales"):
        multiply_rounded(x, factors[:3], weight, None)


@HOPPER
def test_more_than_one_launch_is_no_plan(hand: HandOfInputs, plan: Any) -> None:
    hand.hopper = False  # a build without `many`
    weight = declared("4 bits", "int8 token", torch.float16)

    assert (
        plan(weight, torch.float16).multiply(inputs(65, torch.float16), None, [*weight.fields().values()])
        is None
    )
    assert multiply_rounded(inputs(65, torch.float16), torch.ones(65), weight, None) is None
    assert "quantize" not in hand.called


@HOPPER
def test_a_signature_plans_declared_inputs(plan: Any) -> None:
    weight = declared("fp8 blocks", "fp8 group", torch.float16)
    x: Any = SimpleNamespace(
        is_cuda=True, dtype=torch.float16, get_device=lambda: -1, device=SimpleNamespace(type="cuda")
    )
    tensors = list(weight.fields().values())

    made = signature_of(weight, "declared", None).plan(x, None, tensors)
    assert isinstance(made, CudaPlan)
    assert signature_of(weight, "declared", None).plan(x, None, tensors) is made
    assert signature_of(weight, "unquantized", None).plan(x, None, tensors) is not made
    assert signature_of(weight, "declared", lambda largest: largest).plan(x, None, tensors) is None


@HOPPER
def test_a_share_that_lacks_the_maxima_of_others_has_no_plan(plan: Any) -> None:
    weight = declared("fp8 channel", "fp8 token", torch.float16)
    share = replace(weight, layer=Layer((N,), K, (N, 2 * K), "a", activations=weight.activations))
    x: Any = SimpleNamespace(
        is_cuda=True, dtype=torch.float16, get_device=lambda: -1, device=SimpleNamespace(type="cuda")
    )
    tensors = list(share.fields().values())

    with pytest.raises(ArgumentError, match="maximum_over"):
        signature_of(share, "declared", None).plan(x, None, tensors)
    assert signature_of(share, "declared", "own").plan(x, None, tensors) is not None
    assert plans.way_of(type(share), share.activations, "cuda") == plans.QUANTIZED
