"""What a config tells of experts: names, how many, their activation, where the routing weight goes."""

from typing import Any

import pytest

from qload import ExpertFacts, FakeWorld, architecture_of
from qload.architecture.model_tables import GATING, TABLES
from qload.errors import ArgumentError
from qload.experts import GatedActivation
from qload.experts.names import namings, rows_of_experts
from qload.experts.routing import ROUTERS
from tests.experts.expert_layers import FACTS, NAMES, PREFIX, StoredExperts, plain, stored_plain

pytestmark = pytest.mark.usefixtures("seen_texts")

SPARSE = sorted(name for name, table in TABLES.items() if rows_of_experts(table.rows))
SILU, CLAMPED = GatedActivation("silu"), GatedActivation("clamped_swiglu", 1.702, 7.0)


@pytest.mark.parametrize(
    ("config", "activation", "side"),
    [
        ({"model_type": "mixtral"}, SILU, "output"),
        ({"model_type": "qwen3_moe", "hidden_act": "gelu"}, GatedActivation("gelu"), "output"),
        (
            {"model_type": "qwen2_moe", "hidden_act": "gelu_pytorch_tanh"},
            GatedActivation("gelu_tanh"),
            "output",
        ),
        ({"model_type": "deepseek_v2", "hidden_act": "swish"}, SILU, "output"),
        ({"model_type": "deepseek_v3", "hidden_act": "silu"}, SILU, "output"),
        ({"model_type": "gpt_oss", "hidden_act": "silu"}, CLAMPED, "output"),
        (
            {"model_type": "gpt_oss", "swiglu_limit": 5, "swiglu_alpha": 2.0},
            GatedActivation("clamped_swiglu", 2.0, 5.0),
            "output",
        ),
        ({"model_type": "llama4_text"}, SILU, "input"),
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, SILU, "input"),
    ],
)
def test_a_config_tells_the_activation_and_where_the_weight_goes(
    config: dict[str, Any], activation: GatedActivation, side: Any
) -> None:
    stored = stored_plain(2)
    counted = config | {"num_local_experts": 2, "num_experts": 2, "n_routed_experts": 2}
    counted |= (
        {"text_config": counted["text_config"] | {"num_local_experts": 2}} if "text_config" in config else {}
    )

    weights = stored.weights(architecture=architecture_of(counted))

    assert weights.get_experts(PREFIX).facts == ExpertFacts(activation, side)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mixtral", "hidden_act": "relu2"}, "relu2"),
        ({"model_type": "mixtral", "hidden_act": ["silu"]}, "silu"),
        ({"model_type": "mixtral", "hidden_act": None}, "None"),
        ({"model_type": "gpt_oss", "swiglu_limit": "7"}, "swiglu_limit"),
        ({"model_type": "gpt_oss", "swiglu_limit": True}, "swiglu_limit"),
        ({"model_type": "gpt_oss", "swiglu_alpha": float("nan")}, "swiglu_alpha"),
        ({"model_type": "gpt_oss", "swiglu_alpha": -1}, "swiglu_alpha"),
        ({"model_type": "llama"}, "llama"),
        ({"model_type": "a_new_one"}, "not known"),
    ],
)
def test_what_no_config_tells_the_caller_has_to_say(config: dict[str, Any], named: str) -> None:
    stored = stored_plain(2)
    weights = stored.weights(architecture=architecture_of(config | {"num_local_experts": 2}))

    with pytest.raises(ArgumentError, match="ExpertFacts") as caught:
        weights.get_experts(PREFIX)

    assert named in caught.value.got
    assert not weights.storage.reads  # type: ignore[attr-defined]
    assert weights.get_experts(PREFIX, facts=FACTS).facts == FACTS


def test_facts_that_are_passed_overrule_the_config() -> None:
    weights = stored_plain(2).weights(
        architecture=architecture_of({"model_type": "mixtral", "num_experts": 2})
    )

    assert weights.get_experts(PREFIX, facts=ExpertFacts(CLAMPED, "input")).facts.side == "input"


def test_every_table_with_experts_says_gate_up_and_down_in_this_order_and_has_facts() -> None:
    assert GATING.keys() == ROUTERS.keys() >= {*SPARSE}
    for name in SPARSE:
        gate, up, down = rows_of_experts(TABLES[name].rows)
        (wide, narrow), both = gate.shape.split(), (gate.shape, up.shape)
        assert both == (gate.shape,) * 2
        assert down.shape == f"{narrow} {wide}"
        assert [row.name.rpartition("{expert}.")[2].count("|") for row in (gate, up, down)] in (
            [0] * 3,
            [1] * 3,
        )
    assert namings() == (("w1", "w3", "w2"), NAMES)


@pytest.mark.parametrize("parent", ["block_sparse_moe", "mlp"])
@pytest.mark.parametrize("naming", [("w1", "w3", "w2"), NAMES])
@pytest.mark.parametrize("known", [True, False])
def test_mixtral_is_read_in_every_spelling(parent: str, naming: tuple[str, str, str], known: bool) -> None:
    tensors = {}
    for name, tensor in plain(3, 12, 8).items():
        for own, theirs in zip(NAMES, naming, strict=True):
            name = name.replace(f".{own}.", f".{theirs}.")
        tensors[name.replace(".mlp.", f".{parent}.")] = tensor
    config = {"model_type": "mixtral", "num_local_experts": 3}
    stored = StoredExperts([], tensors, stored_plain(1).loader)
    weights = stored.weights(architecture=architecture_of(config) if known else None)
    prefix = PREFIX.replace(".mlp.", f".{parent}.")

    made = weights.get_experts(prefix, facts=FACTS)

    assert made.shape == (3, 8, 12)
    gate, up, down = (tensors[f"{prefix}.1.{name}.weight"].float() for name in naming)
    gate_up, last = made.dequantize(1)
    assert gate_up[:12].equal(gate)
    assert gate_up[12:].equal(up)
    assert last.equal(down)
    assert weights.report().complete


@pytest.mark.parametrize("split", [None, "experts"])
def test_a_prefix_of_all_names_is_tried_too(split: Any) -> None:
    stored = stored_plain(2)
    weights = stored.weights(next(iter(FakeWorld(2))), prefix="model")

    made = weights.get_experts(PREFIX.removeprefix("model."), facts=FACTS, split=split)

    assert made.shape[0] == (1 if split else 2)
    assert weights.report().complete
