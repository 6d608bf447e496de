"""What rounding can cost, by hand on numbers that every type holds, and that a bound can be broken."""

from dataclasses import replace
from math import e, pi, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qload import DefaultWeightsLoader, ExpertFacts, ExpertsWeight, MemoryStorage, Weights
from qload.experts import GatedActivation
from qload.formats import CTIntConfig, CTIntWeight, UnquantizedWeight
from qload.kernels import bounds
from qload.kernels.bounds import TINY, UNIT, Bounded, exact, excess, of_experts, of_linear, product, roundings
from qload.spec import ActivationScheme, Layer, Weight
from qload.spec.transforms import BlockTransform, Transforms
from qload.testing import assert_within_bound
from tests.experts.expert_layers import FACTS, PREFIX
from tests.experts.test_declared_inputs import TOKEN, opened, routed, tokens_for
from tests.kernel_formats.bnb4_layers import bnb4

X, W = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]])
HALF = torch.float16
SCHEME = ActivationScheme("int", 8, dynamic=True, strategy="token", symmetric=True)


def off(got: Tensor, want: float) -> bool:
    return abs(float(got) - want) > 1e-12 * abs(want)


def test_a_rounding_costs_half_the_distance_of_two_numbers_of_float32() -> None:
    own = torch.finfo(torch.float32)

    assert (own.eps / 2, own.smallest_normal) == (UNIT, TINY)
    assert roundings(3) == pytest.approx(3 * UNIT / (1 - 3 * UNIT), rel=own.eps**2)


def test_a_product_costs_its_sums_and_what_its_inputs_bring() -> None:
    found = product(exact(X), W)

    assert found.value.tolist() == [[-5.0, 0.0]]
    assert not off(found.error[0, 0], roundings(2 + 2) * 11 + TINY)
    assert not off(found.error[0, 1], TINY)
    carried = product(Bounded(X.double(), torch.full((1, 2), 0.5).double()), W)
    assert not off(carried.error[0, 0], 0.5 * 7 + roundings(4) * (11 + 3.5) + TINY)


def test_a_narrow_type_costs_half_a_unit_for_the_matrix_and_another_before_a_bias() -> None:
    own, bias = torch.finfo(HALF), torch.tensor([1.0, 0.0])
    small = 3 * own.smallest_normal * own.eps / 2

    plain, biased = product(exact(X), W, None, HALF), product(exact(X), W, bias, HALF)

    assert not off(plain.error[0, 0], (roundings(4) + own.eps / 2) * 11 + TINY + small)
    assert biased.value[0, 0] == -4
    assert not off(biased.error[0, 0], (roundings(4) + own.eps) * 12 + TINY + small)


def test_more_steps_and_more_of_the_sum_cost_more() -> None:
    usual, found = product(exact(X), W), product(exact(X), W, steps=5, more=0.25)

    assert not off(found.error[0, 0] - usual.error[0, 0], (roundings(7) - roundings(4) + 0.25) * 11)


def test_one_rounding_costs_half_a_unit_of_what_may_be_there() -> None:
    own, given = torch.finfo(HALF), Bounded(torch.tensor([4.0]).double(), torch.tensor([1.0]).double())

    assert not off(given.rounded_to(HALF).error[0], 1 + 5 * own.eps / 2 + own.smallest_normal)
    assert not off(bounds.rounded(given.value, given.error).error[0], 1 + 5 * UNIT + TINY)


def test_what_is_further_off_than_rounding_is_in_excess_and_so_is_nan() -> None:
    want = Bounded(torch.zeros(1).double(), torch.full((1,), 0.5).double())
    budget = float(want.rounded_to(torch.float32).error)

    assert excess(torch.tensor([0.5]), want) <= 1
    assert excess(torch.tensor([2 * budget]), want) == pytest.approx(2)
    assert not bool(excess(torch.tensor([torch.nan]), want) <= 1)


def int8() -> Weight:
    layer = Layer((2,), 2, (2, 2), "up", None, SCHEME)
    codes = torch.tensor([[3, 4], [5, -6]], dtype=torch.int8)
    return CTIntWeight(config=CTIntConfig((1, -1)), weight=codes, weight_scale=torch.ones(2, 1), layer=layer)


def test_inputs_are_those_that_a_weight_declares_unless_they_come_as_they_are() -> None:
    x, weight = torch.tensor([[127.5, 0.4]]), int8()

    assert of_linear(x, weight).value.tolist() == [[381.0, 635.0]]
    as_they_come = of_linear(x, weight, activations="unquantized")
    assert as_they_come.value[0, 0] == pytest.approx(3 * 127.5 + 4 * 0.4)
    assert of_linear(x, weight, torch.tensor([1.0, 2.0])).value.tolist() == [[382.0, 637.0]]


@pytest.mark.parametrize("transforms", [None, Transforms(BlockTransform.of_matrix("t", np.ones((1, 1))))])
def test_each_part_takes_inputs_by_its_own_scale(transforms: Transforms | None) -> None:
    scheme = ActivationScheme("int", 8, dynamic=False, strategy="tensor", scale="input_scale")
    layer = Layer((1, 1), 2, (2, 2), "up", None, scheme, transforms)
    weight = replace(int8(), layer=layer, input_scale=torch.tensor([1.0, 2.0]))  # type: ignore[call-arg]

    found = of_linear(torch.tensor([[5.0, 6.0], [1.0, 0.0], [0.0, 8.0]]), weight)

    assert found.value.tolist() == [[39.0, -16.0], [3.0, 0.0], [32.0, -48.0]]
    assert found.error.shape == (3, 2)


def test_scales_that_were_converted_cost_as_much_as_the_weight() -> None:
    weight = UnquantizedWeight(weight=W)
    usual, found = (of_linear(X.to(HALF), weight, converted=said).error[0, 0] for said in (False, True))
    half = torch.finfo(HALF).eps / 2

    assert not off(found - usual, half * (1 + half) * 11)
    assert of_linear(X.to(HALF), weight).error[0, 0] == usual


def test_a_weight_is_taken_in_slices_of_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = UnquantizedWeight(weight=torch.arange(12.0).reshape(6, 2)), torch.arange(6.0)
    whole = of_linear(X, weight, bias)
    monkeypatch.setattr(bounds, "SLICE", 4)
    slices = of_linear(X, weight, bias)

    assert torch.equal(slices.value, whole.value)
    assert torch.equal(slices.error, whole.error)


def test_infinity_is_right_only_where_rounding_leads_beyond_the_type_and_on_that_side() -> None:
    most, infinity = torch.finfo(HALF).max, float("inf")
    want = exact(torch.tensor([2.0 * most, -2.0 * most, most, most / 2, 1.0, 2.0 * most, most]))
    got = torch.tensor(
        [infinity, -infinity, infinity, infinity, infinity, -infinity, float("nan")], dtype=HALF
    )

    assert (excess(got, want) <= 1).tolist() == [True, True, True, False, False, False, False]


ONE = Bounded(torch.tensor([2.0, -3.0]).double(), torch.tensor([0.5, 0.25]).double())
OTHER = Bounded(torch.tensor([5.0, 7.0]).double(), torch.tensor([0.125, 0.0]).double())
# Of a function: its largest slope, how many roundings it costs, and of which value these are a share.
FUNCTIONS = {
    "sigmoid": (bounds.sigmoid, 1 / 4, 5, torch.sigmoid),
    "silu": (bounds.silu, 1 + 1 / e, 6, torch.nn.functional.silu),
    "gelu": (bounds.gelu, 1 + 1 / sqrt(2 * pi * e), 10, Tensor.abs),
    "gelu_tanh": (bounds.gelu_tanh, 1.75, 14, Tensor.abs),
}


def test_an_operation_carries_the_errors_of_both_operands() -> None:
    total, times = ONE + OTHER, ONE * OTHER

    assert total.value.tolist() == [7, 4]
    assert not off(total.error[0], 0.625 + 7.625 * UNIT + TINY)
    assert not off(total.error[1], 0.25 + 4.25 * UNIT + TINY)
    assert times.value.tolist() == [10, -21]
    carried = 2 * 0.125 + 5 * 0.5 + 0.5 * 0.125
    assert not off(times.error[0], carried + (10 + carried) * UNIT + TINY)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_costs_its_slope_and_its_own_roundings(name: str) -> None:
    of, slope, count, size = FUNCTIONS[name]
    found = of(ONE)

    for at in range(2):
        cost = roundings(count) * float(size(ONE.value[at]).abs())
        assert not off(found.error[at], slope * float(ONE.error[at]) + cost + TINY)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_an_activation_without_numbers_gates_by_its_kind(kind: str) -> None:
    of, *_ = FUNCTIONS[kind]
    want, found = of(ONE) * OTHER, bounds.bound_gated_activation(ONE, OTHER, kind, None, None)

    assert torch.equal(found.value, want.value)
    assert torch.equal(found.error, want.error)


def test_a_clamped_activation_cuts_the_gate_above_and_the_other_half_on_both_sides() -> None:
    gate = Bounded(torch.tensor([2.0, -9.0, 1.0]).double(), torch.zeros(3).double())
    up = Bounded(torch.tensor([1.0, 9.0, -9.0]).double(), torch.zeros(3).double())

    found = bounds.bound_gated_activation(gate, up, "silu", 1.5, 1.75)

    cut = torch.tensor([1.75, -9.0, 1.0]).double()
    want = (torch.tensor([1.0, 1.75, -1.75]).double() + 1) * cut * torch.sigmoid(1.5 * cut)
    torch.testing.assert_close(found.value, want, rtol=1e-14, atol=0)


WIDE, BRAIN = torch.float32, torch.bfloat16
# By the type of x, `between` and `dequantized`: the types between two products, of inputs and of weights.
EXPERT_ROUNDINGS = [
    (HALF, None, None, (WIDE, WIDE, WIDE)),
    (WIDE, None, None, (WIDE, WIDE, WIDE)),
    (BRAIN, None, None, (WIDE, BRAIN, BRAIN)),
    (HALF, HALF, None, (HALF, HALF, HALF)),
    (HALF, None, BRAIN, (WIDE, WIDE, BRAIN)),
]


def one_expert(side: str) -> ExpertsWeight:
    """An expert of 6 inputs and 4 between, with biases."""
    draw = torch.Generator().manual_seed(3)
    shapes = {"gate": (4, 6), "up": (4, 6), "down": (6, 4)}
    tensors = {f"e.0.{name}_proj.weight": torch.randn(s, generator=draw) for name, s in shapes.items()}
    tensors |= {f"e.0.{name}_proj.bias": torch.randn(s[0], generator=draw) for name, s in shapes.items()}
    facts = ExpertFacts(GatedActivation("gelu"), side)  # type: ignore[arg-type]
    return Weights(MemoryStorage(tensors), loader=DefaultWeightsLoader()).get_experts("e", facts=facts)


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize(("dtype", "between", "dequantized", "types"), EXPERT_ROUNDINGS)
def test_an_expert_rounds_between_its_products(
    side: str,
    dtype: torch.dtype,
    between: torch.dtype | None,
    dequantized: torch.dtype | None,
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> None:
    experts, (narrow, inputs, weights) = one_expert(side), types
    x, ids, share = torch.tensor([[0.5, -1, 2, 0, 3, 1]], dtype=dtype), torch.zeros(1, 1).long(), exact(0.3)

    def multiply(rows: Bounded, matrix: Weight, biases: Any) -> Bounded:
        return product(rows.rounded_to(inputs), matrix.dequantize(), biases[0], weights, steps=6)

    rows = (exact(x) * share).rounded_to(narrow) if side == "input" else exact(x)
    halves = multiply(rows, experts.gate_up.expert(0), experts.gate_up_bias).rounded_to(narrow)
    inner = (bounds.gelu(halves[:4]) * halves[4:]).rounded_to(narrow)
    want = multiply(inner, experts.down.expert(0), experts.down_bias)
    want = (want if side == "input" else want.rounded_to(narrow) * share) + exact(torch.zeros(1, 6))

    given = torch.full((1, 1), 0.3).double()
    found = of_experts(x, ids, given, experts, between=between, dequantized=dequantized)

    assert torch.equal(found.value, want.value)
    assert torch.equal(found.error, want.error)


def test_experts_take_the_inputs_that_their_weights_declare() -> None:
    x, ids, share = routed()
    x, experts = tokens_for(TOKEN, x) + 0.01, opened(TOKEN).get_experts(PREFIX, facts=FACTS)

    usual, declared = (of_experts(x, ids, share, experts, *more) for more in ((), ("declared",)))

    assert torch.equal(usual.value, declared.value)
    assert not torch.equal(usual.value, of_experts(x, ids, share, experts, "unquantized").value)
    rounded = of_experts(x, ids, share, experts, dequantized=HALF)
    assert bool((rounded.error > declared.error).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_table_with_quantized_scales_has_a_bound(dtype: torch.dtype) -> None:
    """Their config has an offset of scales, a number, and no offsets of values."""
    make = torch.Generator().manual_seed(0)
    weight = bnb4(torch.randint(16, (32, 128), generator=make), torch.rand(64, generator=make))

    assert_within_bound(
        lambda x: x @ weight.dequantize().to(dtype).T, weight, torch.ones(3, 128, dtype=dtype)
    )
