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
