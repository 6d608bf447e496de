"""`verify` on models of types with a generated table."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import architecture_of
from qload.verify import verify
from tests.verify.checkpoints import model, rules

pytestmark = pytest.mark.usefixtures("seen_texts")

BAMBA: dict[str, Any] = {
    "model_type": "bamba",
    "architectures": ["BambaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 20,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "mamba_d_state": 6,
    "mamba_n_groups": 1,
    "mamba_d_conv": 3,
}


def whole(config: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors of a plain model, which are all different."""
    architecture = architecture_of(config)
    assert architecture is not None
    torch.manual_seed(0)
    tensors = {}
    for name in architecture.required():
        matrix = architecture.expected(name)
        shape = matrix or architecture.shape(name)
        assert shape is not None, name
        tensors[f"{name}.weight" if matrix else name] = torch.randn(shape)
    return tensors


def test_layers_of_two_kinds_are_sound(tmp_path: Path) -> None:
    tensors = whole(BAMBA)
    report = verify(model(tmp_path, tensors, **BAMBA))

    assert "model.layers.1.self_attn.q_proj.weight" in tensors
    assert "model.layers.0.mamba.A_log" in tensors
    assert (report.findings, report.notes) == ((), ())


@pytest.mark.parametrize(
    ("lost", "rule"),
    [
        ("model.layers.1.self_attn.q_proj.weight", "architecture-missing"),
        ("model.layers.2.mamba.A_log", "missing-sibling"),
        ("model.final_layernorm.weight", "architecture-missing"),
    ],
)
def test_a_lost_tensor_is_found(lost: str, rule: str, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in whole(BAMBA).items() if name != lost}

    assert rules(verify(model(tmp_path, tensors, **BAMBA))) == {rule}


def test_another_shape_is_found(tmp_path: Path) -> None:
    tensors = whole(BAMBA)
    tensors["model.layers.0.mamba.in_proj.weight"] = torch.randn(7, 16)

    assert rules(verify(model(tmp_path, tensors, **BAMBA))) == {"architecture-shape"}


def test_a_layer_may_lack_what_its_table_leaves_open(tmp_path: Path) -> None:
    """Without the list of attention layers nothing is known of these."""
    config = {name: value for name, value in BAMBA.items() if name != "attn_layer_indices"}
    lost = "model.layers.2.mamba.A_log"
    tensors = {name: tensor for name, tensor in whole(BAMBA).items() if name != lost}
    report = verify(model(tmp_path, tensors, **config))

    assert report.findings == ()
    assert [note for note in report.notes if lost in note] != []


GRANITE_MOE: dict[str, Any] = {
    "model_type": "granitemoe",
    "architectures": ["GraniteMoeForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "vocab_size": 20,
}


@pytest.mark.parametrize(("experts", "inner", "found"), [(3, 24, False), (2, 24, True), (3, 12, True)])
def test_experts_in_a_tensor_with_the_name_of_a_matrix_have_the_shape_of_the_config(
    experts: int, inner: int, found: bool, tmp_path: Path
) -> None:
    tensors = whole(GRANITE_MOE)
    for layer in range(2):
        lead = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{lead}.input_linear.weight"] = torch.randn(experts, 2 * inner, 16)
        tensors[f"{lead}.output_linear.weight"] = torch.randn(experts, 16, inner)

    found_rules = rules(verify(model(tmp_path, tensors, **GRANITE_MOE)))

    assert found_rules == ({"architecture-shape"} if found else set())


GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "vocab_size": 20,
}


@pytest.mark.parametrize("lost", [None, "transformer.h.1.ln_2.weight"])
def test_a_norm_of_another_name_that_is_zero_is_found(lost: str | None, tmp_path: Path) -> None:
    tensors = whole(GPT2)
    if lost:
        tensors[lost].zero_()

    assert rules(verify(model(tmp_path, tensors, **GPT2))) == ({"constant-values"} if lost else set())


HUNYUAN: dict[str, Any] = {
    "model_type": "hunyuan_v1_dense",
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
}


@pytest.mark.parametrize("lost", [None, "lm_head.weight"])
def test_the_class_of_a_table_is_usual_under_a_name_unlike_its_type(lost: str | None, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in whole(HUNYUAN).items() if name != lost}

    assert rules(verify(model(tmp_path, tensors, **HUNYUAN))) == ({"architecture-missing"} if lost else set())


ERNIE: dict[str, Any] = {
    "model_type": "ernie4_5_moe",
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "moe_num_experts": 3,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
}


@pytest.mark.parametrize(
    ("lost", "rule"),
    [
        (None, None),
        ("model.layers.1.mlp.experts.2.", "architecture-missing"),
        ("model.layers.1.mlp.experts.1.up_proj", "missing-sibling"),
    ],
)
def test_experts_that_a_table_leaves_open_are_counted_in_a_layer_with_others(
    lost: str | None, rule: str | None, tmp_path: Path
) -> None:
    tensors = whole(ERNIE)
    shapes = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}
    for expert in range(3):
        for name, shape in shapes.items():
            tensors[f"model.layers.1.mlp.experts.{expert}.{name}.weight"] = torch.randn(shape)
    tensors = {name: tensor for name, tensor in tensors.items() if lost is None or lost not in name}

    assert rules(verify(model(tmp_path, tensors, **ERNIE))) == ({rule} if rule else set())
