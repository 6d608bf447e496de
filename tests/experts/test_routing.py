"""Routing by formulas written out for single tokens, in Python's own floats."""

from math import exp, inf
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload import Routing
from qload.testing import assert_same_bits

UNIT = 2.0**-24
FEW = st.integers(-6, 6).map(lambda number: number / 2)  # so that many are alike
METHODS = ("softmax_top_k", "top_k_softmax", "top_k_sigmoid", "softmax_grouped", "sigmoid_grouped")


def sigmoid(number: float) -> float:
    return 1 / (1 + exp(-number))


def softmax(numbers: list[float]) -> list[float]:
    powers = [exp(number - max(numbers)) for number in numbers]
    return [power / sum(powers) for power in powers]


def in_groups(numbers: list[float], groups: int) -> list[list[float]]:
    size = len(numbers) // groups
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def close(got: Tensor, want: list[float], steps: int) -> None:
    """Each weight is within `steps` roundings of float32, of which every result there is at most 1."""
    __tracebackhide__ = True
    most = max(1.0, *map(abs, want))
    assert all(abs(a - b) <= steps * UNIT * most for a, b in zip(got.tolist(), want, strict=True)), (
        got,
        want,
    )


def lawful_choice(chosen: list[int], scores: list[float], allowed: list[int]) -> bool:
    """Whether no expert that was left out scores more than one that was chosen."""
    left = [scores[e] for e in allowed if e not in chosen]
    return set(chosen) <= set(allowed) and min(scores[e] for e in chosen) >= max([*left, -inf])


@st.composite
def tokens(draw: st.DrawFn) -> tuple[list[float], list[float], int, int, int]:
    """Logits and biases of one token, groups, groups to choose from, experts to choose."""
    groups, size = draw(st.sampled_from([1, 2, 4])), draw(st.integers(2, 4))
    top_groups = draw(st.integers(1, groups))
    numbers = st.lists(FEW, min_size=groups * size, max_size=groups * size)
    return draw(numbers), draw(numbers), groups, top_groups, draw(st.integers(1, top_groups * size))


@given(token=tokens(), renormalized=st.booleans())
def test_a_softmax_over_all_and_the_largest_of_it(token: Any, renormalized: bool) -> None:
    logits, _, _, _, k = token
    routing = Routing("softmax_top_k", len(logits), k, renormalized=renormalized)

    ids, weights = routing.route(torch.tensor([logits]))

    chosen = ids[0].tolist()
    scores = softmax(logits)
    assert lawful_choice(chosen, logits, list(range(len(logits))))
    total = sum(scores[e] for e in chosen) if renormalized else 1.0
    close(weights[0], [scores[e] / total for e in chosen], 8 * len(logits))


@given(token=tokens())
def test_a_softmax_over_the_largest_alone(token: Any) -> None:
    logits, _, _, _, k = token

    ids, weights = Routing("top_k_softmax", len(logits), k).route(torch.tensor([logits]))

    chosen = ids[0].tolist()
    assert lawful_choice(chosen, logits, list(range(len(logits))))
    close(weights[0], softmax([logits[e] for e in chosen]), 8 * len(logits))


@given(token=tokens())
def test_a_sigmoid_of_each_of_the_largest(token: Any) -> None:
    logits, _, _, _, k = token

    ids, weights = Routing("top_k_sigmoid", len(logits), k).route(torch.tensor([logits]))

    chosen = ids[0].tolist()
    assert lawful_choice(chosen, logits, list(range(len(logits))))
    close(weights[0], [sigmoid(logits[e]) for e in chosen], 8)


@given(token=tokens(), factor=st.sampled_from([1.0, 2.5, 16.0]))
def test_the_largest_of_the_groups_with_the_largest_score(token: Any, factor: float) -> None:
    far, _, groups, top_groups, k = token
    logits = [number / 4 for number in far]  # so that no power outweighs the sum of two others
    routing = Routing("softmax_grouped", len(logits), k, groups=groups, top_groups=top_groups, factor=factor)

    ids, weights = routing.route(torch.tensor([logits]))

    chosen, size = ids[0].tolist(), len(logits) // groups
    of_groups = [max(group) for group in in_groups(logits, groups)]
    scores = softmax(logits)
    best = lawful_groups(chosen, of_groups, top_groups, size)
    assert lawful_choice(chosen, logits, best)
    close(weights[0], [scores[e] * factor for e in chosen], 8 * len(logits))


@given(token=tokens(), factor=st.sampled_from([1.0, 2.5, 16.0]), renormalized=st.booleans())
def test_sigmoids_of_the_groups_whose_two_largest_sum_to_most(
    token: Any, factor: float, renormalized: bool
) -> None:
    logits, bias, groups, top_groups, k = token
    routing = Routing(
        "sigmoid_grouped", len(logits), k, renormalized, groups=groups, top_groups=top_groups, factor=factor
    )

    ids, weights = routing.route(torch.tensor([logits]), torch.tensor(bias))

    chosen, size = ids[0].tolist(), len(logits) // groups
    scores = [sigmoid(number) for number in logits]
    choice = (torch.tensor([logits]).sigmoid() + torch.tensor(bias))[0].tolist()
    sums = [sum(sorted(group)[-2:]) for group in in_groups(choice, groups)]
    best = lawful_groups(chosen, torch.tensor(sums, dtype=torch.float32).tolist(), top_groups, size)
    assert lawful_choice(chosen, choice, best)
    total = sum(scores[e] for e in chosen) if renormalized else 1.0
    close(weights[0], [scores[e] / total * factor for e in chosen], 8 * len(logits))


def lawful_groups(chosen: list[int], of_groups: list[float], top_groups: int, size: int) -> list[int]:
    """The experts that may have been chosen: of groups above the bar, and of those at it that were."""
    bar = sorted(of_groups)[-top_groups]
    sure = {g for g, score in enumerate(of_groups) if score > bar}
    taken = {e // size for e in chosen}
    at_bar = {g for g in taken - sure if of_groups[g] == bar}
    assert taken <= sure | at_bar
    assert len(sure | at_bar) <= top_groups
    return [e for g in sure | at_bar for e in range(g * size, (g + 1) * size)]


# One token, worked by hand

LOGITS = torch.tensor([[2.0, -3.0, 0.0, 1.5, 1.5, -4.0]])


def test_the_largest_score_of_a_group_and_the_two_largest_choose_differently() -> None:
    """Of [2, -3, 0] and [1.5, 1.5, -4] the first has the largest, the second the two of the larger sum."""
    largest = Routing("softmax_grouped", 6, 2, groups=2)
    two = Routing("sigmoid_grouped", 6, 2, groups=2)

    assert set(largest.route(LOGITS)[0][0].tolist()) == {0, 2}
    assert set(two.route(LOGITS, torch.zeros(6))[0][0].tolist()) == {3, 4}


def test_a_softmax_over_the_chosen_knows_nothing_of_the_others() -> None:
    routing = Routing("top_k_softmax", 4, 2)

    assert routing.route(torch.tensor([[3.0, 3.0, 2.0, 1.0]]))[1].tolist() == [[0.5, 0.5]]


def test_a_softmax_over_all_gives_an_expert_the_same_whatever_else_is_chosen() -> None:
    few, all_of_them = (Routing("softmax_top_k", 6, k).route(LOGITS)[1] for k in (2, 6))

    assert_same_bits(few, all_of_them[:, :2])


def test_a_correction_bias_moves_the_choice_and_no_weight() -> None:
    routing = Routing("sigmoid_grouped", 6, 1, factor=2.0)
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, 0.0])

    ids, weights = routing.route(LOGITS, bias)

    assert ids.tolist() == [[2]]
    assert weights.tolist() == [[2.0 * 0.5]]  # the sigmoid of 0, twice


def test_a_negative_bias_leaves_an_expert_of_a_kept_group_above_those_of_others() -> None:
    """Scores of other groups are -inf, not 0: a kept expert of a score below 0 is still chosen."""
    routing = Routing("sigmoid_grouped", 4, 2, groups=2)
    bias = torch.tensor([3.0, -3.0, -1.5, -1.5])

    assert set(routing.route(torch.zeros(1, 4), bias)[0][0].tolist()) == {0, 1}


def test_weights_sum_to_the_factor_where_they_are_renormalized() -> None:
    for method, factor in (("softmax_top_k", 1.0), ("sigmoid_grouped", 2.5)):
        routing = Routing(method, 6, 3, renormalized=True, factor=factor)
        bias = torch.zeros(6) if routing.corrected else None

        _, weights = routing.route(LOGITS, bias)

        close(weights.sum(-1), [factor], 16)


@pytest.mark.parametrize("method", ["softmax_grouped", "sigmoid_grouped"])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_factor_multiplies_weights_once_and_chooses_nothing(method: Any, groups: int) -> None:
    routing, scaled = (Routing(method, 6, 3, groups=groups, factor=factor) for factor in (1.0, 16.0))
    bias = [torch.zeros(6)] if routing.corrected else []

    (ids, weights), (same, more) = routing.route(LOGITS, *bias), scaled.route(LOGITS, *bias)

    assert torch.equal(ids, same)
    assert_same_bits(more, weights * 16)


def test_sigmoids_of_nothing_but_zeros_are_divided_by_no_zero() -> None:
    routing = Routing("sigmoid_grouped", 2, 1, renormalized=True)

    _, weights = routing.route(torch.tensor([[-200.0, -300.0]]), torch.zeros(2))

    assert weights.tolist() == [[0.0]]


@pytest.mark.parametrize("count", [3, 8, 64, 200])
def test_equal_scores_are_chosen_as_torch_chooses(count: int) -> None:
    """One rule for all methods: that of `torch.topk` on a row of equal numbers."""
    same = torch.zeros(2, count)
    first = same.topk(2).indices
    for method in METHODS[:3]:
        assert torch.equal(Routing(method, count, 2).route(same)[0], first)
    unsorted = same.topk(2, sorted=False).indices
    assert torch.equal(Routing("softmax_grouped", count, 2).route(same)[0], unsorted)
    assert torch.equal(Routing("sigmoid_grouped", count, 2).route(same, torch.zeros(count))[0], unsorted)


DTYPES = {
    "softmax_top_k": torch.float32,
    "top_k_softmax": torch.bfloat16,
    "top_k_sigmoid": torch.bfloat16,
    "softmax_grouped": torch.float32,
    "sigmoid_grouped": torch.float32,
}


@pytest.mark.parametrize("method", METHODS)
def test_dtypes_of_logits_and_weights(method: Any) -> None:
    routing, x = Routing(method, 4, 2), torch.ones(3, 5, 8).bfloat16()
    bias = torch.zeros(4) if routing.corrected else None

    logits = routing.logits(x, torch.ones(4, 8).bfloat16())
    ids, weights = routing.route(torch.zeros(3, 5, 4).bfloat16(), bias)

    grouped = method.endswith("grouped")
    assert (logits.dtype, logits.shape) == (torch.float32 if grouped else torch.bfloat16, (3, 5, 4))
    assert (ids.dtype, ids.shape, weights.dtype, weights.shape) == (
        torch.int64,
        (3, 5, 2),
        DTYPES[method],
        (3, 5, 2),
    )


def test_weights_that_are_rounded_have_the_dtype_of_the_logits() -> None:
    wide = Routing("softmax_top_k", 6, 3, renormalized=True)
    narrow = Routing("softmax_top_k", 6, 3, renormalized=True, rounded=True)
    logits = LOGITS.bfloat16()

    assert_same_bits(narrow.route(logits)[1], wide.route(logits)[1].bfloat16())
    assert_same_bits(narrow.route(LOGITS)[1], wide.route(LOGITS)[1])


@pytest.mark.parametrize("method", ["softmax_top_k", "top_k_sigmoid", "softmax_grouped", "sigmoid_grouped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_narrow_logits_are_float32(method: Any, dtype: torch.dtype) -> None:
    """A sigmoid alone is rounded to the dtype of the logits in the end."""
    routing = Routing(method, 16, 5)
    logits = torch.randn(9, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    bias = [torch.linspace(-1, 1, 16)] if routing.corrected else []

    ids, weights = routing.route(logits, *bias)

    wide_ids, wide = routing.route(logits.float(), *bias)
    assert torch.equal(ids, wide_ids)
    assert_same_bits(weights, wide.to(dtype) if method == "top_k_sigmoid" else wide)


def test_a_router_in_float32_multiplies_what_is_stored_in_float32() -> None:
    """In bfloat16 both products would be 256, and the sum of the second."""
    x, weight = torch.tensor([[1.0, 1.0]]).bfloat16(), torch.tensor([[256.0, 1.0], [256.0, 0.0]]).bfloat16()

    assert Routing("softmax_grouped", 2, 1).logits(x, weight).tolist() == [[257.0, 256.0]]
    assert Routing("softmax_top_k", 2, 1).logits(x, weight).dtype == torch.bfloat16
    assert Routing("top_k_softmax", 2, 1).logits(x, weight, torch.tensor([1.0, 8.0]).bfloat16()).tolist() == [
        [258.0, 264.0]
    ]
