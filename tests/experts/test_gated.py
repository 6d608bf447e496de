"""Activations between gate and up: numbers worked by hand, NaN, and what is refused."""

from math import erf, exp, inf, nan, sqrt, tanh
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload import GatedActivation
from qload.errors import ArgumentError
from qload.kernels.bounds import bound_gated_activation, exact
from tests.experts.bounds import assert_within

GPT_OSS = GatedActivation("clamped_swiglu", 1.702, 7.0)
PLAIN = [GatedActivation("silu"), GatedActivation("gelu"), GatedActivation("gelu_tanh")]
NUMBERS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=9)


def by_hand(activation: GatedActivation, gate: float, up: float) -> float:
    if activation == GPT_OSS:
        gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
        return (up + 1) * gate / (1 + exp(-1.702 * gate))
    acts = {
        "silu": gate / (1 + exp(-gate)),
        "gelu": gate / 2 * (1 + erf(gate / sqrt(2))),
        "gelu_tanh": gate / 2 * (1 + tanh(sqrt(2 / 3.141592653589793) * (gate + 0.044715 * gate**3))),
    }
    return acts[activation.kind] * up


@pytest.mark.parametrize("activation", [*PLAIN, GPT_OSS], ids=lambda each: each.kind)
@given(gates=NUMBERS, ups=NUMBERS)
def test_gate_and_up_become_what_the_formula_says(
    activation: GatedActivation, gates: list[float], ups: list[float]
) -> None:
    count = min(len(gates), len(ups))
    gate, up = torch.tensor(gates[:count]), torch.tensor(ups[:count])

    got = activation(gate, up)

    bound = bound_gated_activation(
        exact(gate), exact(up), activation.kind, activation.alpha, activation.limit
    )
    assert_within(got, bound)
    own = [by_hand(activation, g, u) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    assert_within(torch.tensor(own, dtype=torch.float64), bound)


def test_the_limits_of_gpt_oss_by_hand() -> None:
    """A gate has no lower limit; up has both; and an up of -1 leaves nothing."""
    gate = torch.tensor([100.0, 7.0, -100.0, 1.0, 1.0, 5.0, 0.0])
    up = torch.tensor([0.0, 0.0, 0.0, 50.0, -50.0, -1.0, 3.0])

    got, bound = (
        GPT_OSS(gate, up),
        bound_gated_activation(exact(gate), exact(up), "clamped_swiglu", 1.702, 7.0),
    )

    one = 1 / (1 + exp(-1.702))
    want = [7 / (1 + exp(-1.702 * 7)), 7 / (1 + exp(-1.702 * 7)), 0.0, 8 * one, -6 * one, 0.0, 0.0]
    assert got[0] == got[1]
    assert_within(got, bound)
    assert_within(torch.tensor(want, dtype=torch.float64), bound)


@pytest.mark.parametrize("activation", [*PLAIN, GPT_OSS], ids=lambda each: each.kind)
def test_nan_stays_nan_and_dtypes_stay_as_they_are(activation: GatedActivation) -> None:
    gate, up = torch.tensor([nan, 1.0]), torch.tensor([1.0, nan])

    assert bool(activation(gate, up).isnan().all())
    assert activation(gate.double(), up.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("kind", "alpha", "limit", "argument"),
    [
        ("clamped_swiglu", None, 7.0, "alpha"),
        ("clamped_swiglu", 1.702, None, "limit"),
        ("clamped_swiglu", nan, 7.0, "alpha"),
        ("clamped_swiglu", 1.702, inf, "limit"),
        ("clamped_swiglu", 1.702, 0.0, "limit"),
        ("clamped_swiglu", -1.0, 7.0, "alpha"),
        ("silu", 1.702, None, "alpha"),
        ("gelu", None, 7.0, "limit"),
        ("relu", None, None, "kind"),
        ("clamped_swiglu", "1.702", 7.0, "alpha"),
    ],
)
def test_an_activation_that_is_none_is_refused(kind: Any, alpha: Any, limit: Any, argument: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        GatedActivation(kind, alpha, limit)

    assert refused.value.argument == argument
