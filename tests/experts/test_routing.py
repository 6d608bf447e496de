"""Routing by formulas written out for single tokens, in Python's own floats; configs that are refused."""

from collections.abc import Mapping
from math import exp, inf, nan
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload import Routing, routing_of
from qload.errors import ArgumentError, ConfigError, DtypeError, QloadError, ShapeError
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


# What is refused

GOOD: dict[str, Any] = {"method": "sigmoid_grouped", "experts": 8, "top_k": 2, "groups": 4, "top_groups": 2}
UNGROUPED = {"method": "softmax_top_k", "groups": 1, "top_groups": 1}
BAD: Mapping[str, tuple[dict[str, Any], str]] = {
    "none": ({"experts": 0}, "experts"),
    "no-choice": ({"top_k": 0}, "top_k"),
    "more-than-all": ({"top_k": 9, **UNGROUPED}, "top_k"),
    "more-than-groups-have": ({"top_k": 5}, "top_k"),
    "divides": ({"groups": 3}, "groups"),
    "no-groups": ({"groups": 0}, "groups"),
    "groups-of-one": ({"groups": 8}, "groups"),
    "groups-below-0": ({"groups": -4}, "groups"),
    "too-many-groups": ({"top_groups": 5}, "top_groups"),
    "no-top-groups": ({"top_groups": 0}, "top_groups"),
    "nan": ({"factor": nan}, "factor"),
    "inf": ({"factor": inf}, "factor"),
    "zero": ({"factor": 0.0}, "factor"),
    "negative": ({"factor": -2.5}, "factor"),
    "more-than-float32": ({"factor": 1e39}, "factor"),
    "less-than-float32": ({"factor": 1e-46}, "factor"),
    "ungrouped-groups": ({"method": "top_k_softmax"}, "groups"),
    "ungrouped-top": ({**UNGROUPED, "top_groups": 2}, "top_groups"),
    "ungrouped-factor": ({**UNGROUPED, "factor": 2.0}, "factor"),
    "renormalized-sigmoid": ({**UNGROUPED, "method": "top_k_sigmoid", "renormalized": True}, "renormalized"),
    "renormalized-v2": ({"method": "softmax_grouped", "renormalized": True}, "renormalized"),
    "rounded": ({"rounded": True}, "rounded"),
    "method": ({"method": "top_p"}, "method"),
    "flag": ({"top_k": True}, "top_k"),
}


@pytest.mark.parametrize(("changed", "field"), BAD.values(), ids=BAD)
def test_what_no_router_can_do_is_refused_by_its_name(changed: dict[str, Any], field: str) -> None:
    Routing(**GOOD)
    with pytest.raises(ArgumentError) as refused:
        Routing(**{**GOOD, **changed})

    assert refused.value.argument == field


def test_groups_of_one_expert_have_a_largest_score_and_no_two() -> None:
    assert Routing("softmax_grouped", 4, 2, groups=4, top_groups=2).route(torch.eye(4))[0].shape == (4, 2)


V2, V3 = Routing("softmax_grouped", 4, 2), Routing("sigmoid_grouped", 4, 2)
CALLS: Mapping[str, tuple[Routing, tuple[Any, ...], type[QloadError], str]] = {
    "width": (V2, (torch.zeros(1, 5),), ShapeError, r"logits: wrong shape\n  expected \(\.\.\., 4\)"),
    "scalar": (V2, (torch.zeros(()),), ShapeError, "logits: wrong shape"),
    "whole": (V2, (torch.zeros(1, 4).int(),), DtypeError, "logits: wrong dtype"),
    "no-bias": (V3, (torch.zeros(1, 4),), ArgumentError, r"correction_bias\n  expected a tensor \(4,\)"),
    "bias": (V2, (torch.zeros(1, 4), torch.zeros(4)), ArgumentError, r"correction_bias\n  expected None"),
    "bias-shape": (V3, (torch.zeros(1, 4), torch.zeros(1)), ShapeError, r"correction_bias: wrong shape"),
    "list": (V2, ([0.0] * 4,), ArgumentError, "logits"),
}  # fmt: skip


@pytest.mark.parametrize(("routing", "given", "error", "said"), CALLS.values(), ids=CALLS)
def test_a_call_that_does_not_fit_is_refused(
    routing: Routing, given: tuple[Any, ...], error: type[QloadError], said: str
) -> None:
    with pytest.raises(error, match=said):
        routing.route(*given)


@pytest.mark.parametrize(
    ("x", "weight", "said"),
    [
        (torch.ones(1, 8), torch.ones(5, 8), r"router: weight: wrong shape\n  expected \(4, H\)"),
        (torch.ones(1, 8), torch.ones(4), "router: weight: wrong shape"),
        (torch.ones(1, 7), torch.ones(4, 8), r"router: x: wrong shape\n  expected \(\.\.\., 8\)"),
        (torch.ones(1, 8), torch.ones(4, 8).half(), r"x: wrong dtype\n  expected float16, as its weight"),
    ],
)  # fmt: skip
def test_a_router_that_does_not_fit_is_refused(x: Tensor, weight: Tensor, said: str) -> None:
    with pytest.raises(QloadError, match=said):
        Routing("softmax_top_k", 4, 2).logits(x, weight)


# Configs

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
READ: Mapping[str, tuple[dict[str, Any], Routing]] = {
    "mixtral": ({}, Routing("softmax_top_k", 8, 2, renormalized=True)),
    "qwen2_moe": ({}, Routing("softmax_top_k", 60, 4, rounded=True)),
    "qwen3_moe": (
        {"num_local_experts": 16, "norm_topk_prob": True},
        Routing("softmax_top_k", 16, 8, renormalized=True, rounded=True),
    ),
    "gpt_oss": ({"num_local_experts": 32}, Routing("top_k_softmax", 32, 4)),
    "llama4_text": ({}, Routing("top_k_sigmoid", 16, 1)),
    "deepseek_v2": (
        {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy",
         "routed_scaling_factor": 16, "norm_topk_prob": True},
        Routing("softmax_grouped", 64, 6, groups=8, top_groups=3, factor=16.0),
    ),
    "deepseek_v3": ({}, Routing("sigmoid_grouped", 256, 8, True, groups=8, top_groups=4, factor=2.5)),
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_a_config_is_read_with_the_defaults_of_its_type(kind: str) -> None:
    said, routing = READ[kind]

    assert routing_of({"model_type": kind, **said}) == routing


def test_groups_of_v2_count_only_where_its_method_has_any() -> None:
    greedy = {"model_type": "deepseek_v2", "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3}

    assert routing_of(greedy) == Routing("softmax_grouped", 64, 6)


def test_the_text_model_inside_of_another_is_meant() -> None:
    inner = {"model_type": "llama4_text", "num_local_experts": 4}

    assert routing_of({"model_type": "llama4", "text_config": inner}).experts == 4
    with pytest.raises(ConfigError, match=r"config.json: text_config\.num_experts_per_tok"):
        routing_of({"model_type": "llama4", "text_config": {**inner, "num_experts_per_tok": 5}})


HOSTILE: Mapping[str, tuple[dict[str, Any], str]] = {
    "type": ({"model_type": "llama"}, "model_type"),
    "unknown": ({"model_type": "grok"}, "model_type"),
    "no-type": ({"model_type": ["mixtral"]}, "model_type"),
    "top-k": ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
    "top-k-of-groups": ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
    "top-k-text": ({"num_experts_per_tok": "3"}, "num_experts_per_tok"),
    "top-k-flag": ({"num_experts_per_tok": True}, "num_experts_per_tok"),
    "top-k-null": ({"num_experts_per_tok": None}, "num_experts_per_tok"),
    "top-k-huge": ({"num_experts_per_tok": 1 << 80}, "num_experts_per_tok"),
    "top-k-0": ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
    "experts": ({"n_routed_experts": "16"}, "n_routed_experts"),
    "experts-null": ({"n_routed_experts": None}, "n_routed_experts"),
    "experts-0": ({"n_routed_experts": 0}, "n_routed_experts"),
    "groups": ({"n_group": 3}, "n_group"),
    "groups-0": ({"n_group": 0}, "n_group"),
    "groups-float": ({"n_group": 4.5}, "n_group"),
    "groups-null": ({"n_group": None}, "n_group"),
    "groups-of-one": ({"n_group": 16}, "n_group"),
    "top-groups": ({"topk_group": 5}, "topk_group"),
    "nan": ({"routed_scaling_factor": nan}, "routed_scaling_factor"),
    "inf": ({"routed_scaling_factor": inf}, "routed_scaling_factor"),
    "huge": ({"routed_scaling_factor": 10**400}, "routed_scaling_factor"),
    "beyond-float32": ({"routed_scaling_factor": 1e300}, "routed_scaling_factor"),
    "zero": ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
    "factor-text": ({"routed_scaling_factor": "2.5"}, "routed_scaling_factor"),
    "renormalized": ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
    "renormalized-number": ({"norm_topk_prob": 1}, "norm_topk_prob"),
    "scores": ({"scoring_func": "softmax"}, "scoring_func"),
    "method": ({"topk_method": "greedy"}, "topk_method"),
    "v2-scores": ({"model_type": "deepseek_v2", "topk_method": "greedy"}, "scoring_func"),
    "v2-method": ({"model_type": "deepseek_v2", "scoring_func": "softmax"}, "topk_method"),
}


@pytest.mark.parametrize(("changed", "key"), HOSTILE.values(), ids=HOSTILE)
def test_a_config_that_no_router_can_follow_is_refused_by_its_key(changed: dict[str, Any], key: str) -> None:
    routing_of(DEEPSEEK)
    with pytest.raises(ConfigError) as refused:
        routing_of({**DEEPSEEK, **changed})

    assert (refused.value.file, refused.value.key) == ("config.json", key)


def test_v2_has_to_say_how_many_experts_a_token_goes_to_and_its_groups() -> None:
    bare = {"model_type": "deepseek_v2"}
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        routing_of(bare)
    assert routing_of({**bare, "num_experts_per_tok": 2}) == Routing("softmax_grouped", 64, 2)
    with pytest.raises(ConfigError, match="topk_group"):
        routing_of({**bare, "num_experts_per_tok": 2, "topk_method": "group_limited_greedy", "n_group": 8})


@given(
    said=st.dictionaries(
        st.sampled_from([*DEEPSEEK, "norm_topk_prob", "routed_scaling_factor", "num_experts", "text_config"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
            lambda held: st.lists(held, max_size=2) | st.dictionaries(st.text(max_size=2), held, max_size=2),
            max_leaves=4,
        ),
    ),
    kind=st.sampled_from([*READ, "llama4", "other"]),
)
def test_any_config_is_read_or_refused(said: dict[str, Any], kind: str) -> None:
    try:
        routing = routing_of({**DEEPSEEK, **said, "model_type": kind})
    except QloadError:
        return
    assert 1 <= routing.top_k <= routing.experts
