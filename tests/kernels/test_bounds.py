"""What rounding can cost, by hand on numbers that every type holds, and that a bound can be broken."""

import pytest
import torch
from torch import Tensor

from qload.formats import CTIntConfig, CTIntWeight, UnquantizedWeight
from qload.kernels import bounds
from qload.kernels.bounds import TINY, UNIT, Bounded, exact, excess, of_linear, product, roundings
from qload.spec import ActivationScheme, Layer, Weight

X, W = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]])
HALF = torch.float16
SCHEME = ActivationScheme("int", 8, dynamic=True, strategy="token", symmetric=True)


def off(got: Tensor, want: float) -> bool:
    return abs(float(got) - want) > 1e-12 * abs(want)


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


def test_scales_that_were_converted_cost_as_much_as_the_weight() -> None:
    weight = UnquantizedWeight(weight=W)
    usual, found = (of_linear(X.to(HALF), weight, converted=said).error[0, 0] for said in (False, True))
    half = torch.finfo(HALF).eps / 2

    assert not off(found - usual, half * (1 + half) * 11)


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
