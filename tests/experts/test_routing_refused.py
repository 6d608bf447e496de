"""What no router can do, and calls that do not fit it."""

from collections.abc import Mapping
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import Routing
from qload.errors import ArgumentError, DtypeError, QloadError, ShapeError

pytestmark = pytest.mark.usefixtures("seen_texts")

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


LAWFUL: list[dict[str, Any]] = [
    {"top_k": 4},
    {"top_groups": 4, "top_k": 8},
    {"groups": 1, "top_groups": 1, "top_k": 8},
    {"method": "softmax_grouped", "groups": 8},
    {"factor": torch.finfo(torch.float32).max},
    {"factor": torch.finfo(torch.float32).tiny},
    {"renormalized": True},
    {**UNGROUPED, "top_k": 8, "renormalized": True, "rounded": True},
    {**UNGROUPED, "experts": 1, "top_k": 1},
]


@pytest.mark.parametrize("changed", LAWFUL, ids=str)
def test_the_last_lawful_sizes_of_a_router_are_taken(changed: dict[str, Any]) -> None:
    routing = Routing(**{**GOOD, **changed})

    assert {name: getattr(routing, name) for name in changed} == changed


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
