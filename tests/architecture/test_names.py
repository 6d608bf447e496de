"""Adapters by names of tensors: what they are beside, and the names inside of PEFT's wrappers."""

import pytest

from qload.architecture import architecture_of
from qload.architecture.names import (
    adapters_of,
    base_name,
    block_of,
    is_adapter,
    projection_groups,
    refuse_adapters,
)
from qload.errors import MismatchError

pytestmark = pytest.mark.usefixtures("seen_texts")

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "name",
    [
        f"{Q}.lora_A.weight",
        f"{Q}.lora_B.default.weight",
        f"{Q}.lora_magnitude_vector.default.weight",
        f"{Q}.lora_magnitude_vector",
        "model.embed_tokens.lora_embedding_A.default",
        "model.embed_tokens.lora_embedding_B",
        f"{Q}.lora_E.default",
        f"{Q}.ia3_l.default",
        f"{Q}.hada_w1_a.default",
    ],
)
def test_parameters_of_adapters_are_known_by_a_segment(name: str) -> None:
    assert is_adapter(name)
    found = adapters_of([f"{name.split('.lora_')[0].split('.ia3')[0].split('.hada')[0]}.weight", name])
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "name",
    [
        f"{Q}.weight",
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.lora_adapter.weight",
        "xlora_A.weight",
        "model.layers.0.time_decay_w1",
    ],
)
def test_other_names_are_of_no_adapter(name: str) -> None:
    assert not is_adapter(name)
    assert adapters_of([f"{Q}.weight", name]) is None


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        (f"{Q}.base_layer.qweight", f"{Q}.qweight"),
        (f"base_model.model.{Q}.base_layer.weight.absmax", f"{Q}.weight.absmax"),
        (f"base_model.model.{Q}.weight", f"{Q}.weight"),
        ("lm_head.original_module.weight", "lm_head.weight"),
        ("lm_head.modules_to_save.default.weight", "lm_head.weight"),
        (f"{Q}.weight", f"{Q}.weight"),
    ],
)
def test_the_name_inside_of_the_wrappers(name: str, inner: str) -> None:
    assert base_name(name) == inner


def test_a_wrapped_name_is_the_matrix_of_the_table_and_missing_ones_are_spelled_alike() -> None:
    model = architecture_of({"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4})
    assert model is not None

    place = model.find(f"base_model.model.{Q}.base_layer")

    assert model.expected(f"base_model.model.{Q}.base_layer") == (16, 16)
    assert place is not None
    assert (place.layer, place.lead) == (0, "base_model.model.")
    assert model.find(f"{Q}.lora_A.default") is None


def test_an_adapter_alone_is_no_model_with_adapters() -> None:
    assert adapters_of([f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"]) is None


def test_the_layer_and_the_number_of_layers_are_told() -> None:
    names = [f"{Q}.base_layer.qweight", f"{Q}.lora_A.default.weight", f"{Q}.lora_B.default.weight"]
    names += ["lm_head.original_module.weight", "lm_head.modules_to_save.default.weight"]

    with pytest.raises(MismatchError) as caught:
        refuse_adapters(sorted(names))

    assert caught.value.got == (
        f"{Q}.lora_A.default.weight is an unmerged adapter of {Q}.base_layer, one of 2 such layers"
    )
    assert "merge_and_unload" in str(caught.value)


def test_layers_of_old_versions_have_the_adapter_in_themselves() -> None:
    found = adapters_of([f"{Q}.qweight", f"{Q}.scales", f"{Q}.lora_A.default.weight"])

    assert found is not None
    assert (found.layer, found.count) == (Q, 1)


def test_projections_with_one_input_are_a_group_whatever_is_missing() -> None:
    stored = [f"a.{name}" for name in ("v_proj", "q_proj", "o_proj", "up_proj", "gate_proj", "w3", "w2")]
    stored += ["b.k_proj", "b.v_proj", "b.w1", "b.w3", "q_proj", "k_proj", "v_proj"]

    assert projection_groups(stored) == {
        "a.gate_proj": ["a.gate_proj", "a.up_proj"],
        "a.q_proj": ["a.q_proj", "a.v_proj"],
        "b.k_proj": ["b.k_proj", "b.v_proj"],
        "b.w1": ["b.w1", "b.w3"],
        "q_proj": ["q_proj", "k_proj", "v_proj"],
    }


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3"),
        ("backbone.layers.3.mixer.experts.7.up_proj.weight", "backbone.layers.3"),
        ("bert.encoder.layer.3.output.dense.weight", "bert.encoder.layer.3"),
        (
            "vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight",
            "vision_tower.vision_model.encoder.layers.3",
        ),
        ("transformer.h.3.ln_1.weight", "transformer.h.3"),
        ("gpt_neox.layers.3.mlp.dense_4h_to_h.weight", "gpt_neox.layers.3"),
        ("projector.layers.2.weight", None),
        ("model.layernorm.3.weight", None),
    ],
)
def test_a_block_is_the_first_number_after_a_list_of_blocks(name: str, block: str | None) -> None:
    assert block_of(name) == block
