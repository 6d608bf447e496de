"""Calls that a kernel of the CUDA module does not take, and what takes them instead."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qload.errors import ArgumentError
from qload.kernels.cuda import dispatch, linear, marlin
from qload.kernels.cuda.linear import able
from qload.testing import assert_sums_exactly
from tests.kernels.cuda_by_hand import Hand
from tests.kernels.cuda_layers import AMPERE, HOPPER, _operators, hand, layer

__all__ = ["_operators", "hand"]  # fixtures


@pytest.mark.parametrize("chip", [HOPPER])
@pytest.mark.parametrize("name", ["scales", "qzeros"])
def test_scales_and_zero_points_that_start_between_two_loads_are_dequantized(hand: Hand, name: str) -> None:
    weight = layer(256, 64, 128, 4, torch.float16, zeros=True)
    held = weight.fields()[name]
    memory = torch.empty(held.numel() + 1, dtype=held.dtype)
    moved = weight.holding({name: memory[1:].view(held.shape).copy_(held)})

    assert_sums_exactly(lambda x: linear(x, moved), weight, torch.float16, M=1)

    assert hand.called == ["dequantize"]


@pytest.mark.parametrize("chip", [HOPPER])
def test_what_torch_has_to_multiply_is_left_to_it(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    ways: Any = import_module("qload.kernels.cuda.linear")
    monkeypatch.setattr(ways, "why_not_linear", lambda weight, dtype: None)
    weight = layer(256, 64, 128, 4, torch.float16)
    x, bias = torch.ones(1, 256).half(), torch.zeros(64).half()
    differentiable = x.clone().requires_grad_()

    assert ways.can_multiply(x, weight, None)
    assert ways.can_multiply(x, weight, bias)
    assert not ways.can_multiply(x, weight, bias.float())
    assert not ways.can_multiply(x, weight, torch.zeros(128).half()[::2])
    assert not ways.can_multiply(differentiable, weight, None)
    assert not ways.can_multiply(x, weight, bias.clone().requires_grad_())
    with torch.no_grad():
        assert ways.can_multiply(differentiable, weight, None)


@pytest.mark.parametrize("chip", [HOPPER])
@pytest.mark.parametrize("M", [1, 17])
def test_a_weight_that_starts_between_two_loads_is_dequantized(hand: Hand, M: int) -> None:
    weight = layer(256, 64, 128, 4, torch.float16)
    memory = torch.empty(weight.qweight.numel() + 1, dtype=torch.int32)
    moved = weight.holding({"qweight": memory[1:].view(weight.qweight.shape).copy_(weight.qweight)})

    assert_sums_exactly(lambda x: linear(x, moved), weight, torch.float16, M=M)

    assert hand.called == ["dequantize"]


@pytest.mark.parametrize("chip", [HOPPER])
@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"bits": 0}, "group_size"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 128}, "scales"),
        ({"weights": torch.zeros(12, 129, dtype=torch.int32)}, "weights"),
        ({"weights": torch.zeros(12, dtype=torch.int32)}, "weights"),
        ({"perm": torch.arange(192, dtype=torch.int32)}, "perm"),
        ({"is_k_full": False}, "perm"),
        ({"scales": torch.zeros(5, 64).half()}, "scales"),
        ({"N": -1}, "x"),
        ({"N": 65}, "x"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(hand: Hand, changed: dict, wrong: str) -> None:
    weight = layer(192, 64, 64, 4, torch.float16)
    read = marlin.MarlinCall(*marlin.arguments(torch.ones(1, 192).half(), weight))

    with pytest.raises(ArgumentError, match=wrong):
        marlin.multiply(marlin.KERNELS, replace(read, **changed), "")
    assert not hand.called


@pytest.mark.parametrize("chip", [HOPPER])
@pytest.mark.parametrize(
    ("layout", "M", "names"),
    [
        ("marlin", 16, ["decode", "large"]),
        ("marlin", 17, ["large"]),
        ("strips", 48, ["decode", "many", "mma", "large"]),
        ("strips", 49, ["many", "mma", "large"]),
        ("exllama", 64, ["few", "large"]),
        ("exllama", 65, ["large"]),
    ],
)
def test_the_bench_is_told_which_kernels_there_are(hand: Hand, layout: str, M: int, names: list[str]) -> None:
    weight = layer(256, 64, 128, 4, torch.float16, layout)

    assert able(torch.ones(M, 256).half(), weight) == names


@pytest.mark.parametrize("chip", [AMPERE, HOPPER, (7, 5)])
def test_a_weight_is_multiplied_in_its_own_16_bits_from_ampere_on(hand: Hand) -> None:
    half, single = (
        SimpleNamespace(device=torch.device("cuda"), scales=torch.ones(1, dtype=dtype))
        for dtype in (torch.float16, torch.float32)
    )

    if hand.capability < dispatch.CAPABILITY:
        assert "needs a CUDA device of capability 8.0" in str(dispatch.why_not(half, torch.float16))
        return
    assert dispatch.why_not(half, torch.float16) is None
    for weight, dtype in ((half, torch.bfloat16), (single, torch.float16), (single, torch.float32)):
        assert "needs float16 or bfloat16 of both" in str(dispatch.why_not(weight, dtype))
