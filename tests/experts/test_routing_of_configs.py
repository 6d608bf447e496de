"""What a model's config tells of its router, and which of its keys says nonsense."""

from collections.abc import Mapping
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qload import Routing, routing_of
from qload.errors import ConfigError, QloadError

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
    "deepseek_v32": (
        {"n_routed_experts": 256},
        Routing("sigmoid_grouped", 256, 8, True, groups=8, top_groups=4, factor=2.5),
    ),
    "glm4_moe": ({"n_routed_experts": 16}, Routing("sigmoid_grouped", 16, 8, True)),
    "glm4_moe_lite": ({"n_routed_experts": 16}, Routing("sigmoid_grouped", 16, 4, True, factor=1.8)),
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
