"""Valid layers with the appearance of damage, and damage without evidence in other tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.verify import verify
from tests.verify.checkpoints import model, rules

pytestmark = pytest.mark.usefixtures("seen_texts")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 48,
    "tie_word_embeddings": False,
}


def llama() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens": (48, 32), "lm_head": (48, 32)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.self_attn.{name}_proj": (32, 32) for name in "qkvo"}
        shapes |= {f"model.layers.{layer}.mlp.{name}_proj": (64, 32) for name in ("gate", "up")}
        shapes[f"model.layers.{layer}.mlp.down_proj"] = (32, 64)
    tensors = {f"{name}.weight": torch.randn(shape, generator=random) / 32 for name, shape in shapes.items()}
    norms = [
        f"model.layers.{layer}.{name}_layernorm" for layer in range(2) for name in ("input", "post_attention")
    ]
    return tensors | {f"{name}.weight": torch.ones(32) for name in (*norms, "model.norm")}


def test_norms_that_are_all_zero_are_found_where_the_model_multiplies_by_them(tmp_path: Path) -> None:
    tensors = {name: tensor * ("norm" not in name) for name, tensor in llama().items()}

    report = verify(model(tmp_path, tensors, **LLAMA))

    assert {finding.tensor for finding in report.findings} == {name for name in tensors if "norm" in name}
    assert rules(report) == {"constant-values"}


def test_experts_of_zeros_alone_say_nothing(tmp_path: Path) -> None:
    """No other tensor shows the expected values; zeros are a finding for norms only."""
    config = {"model_type": "gpt_oss", "num_hidden_layers": 1, "hidden_size": 32, "num_local_experts": 4}
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 32, 128)}

    assert "constant-values" not in rules(verify(model(tmp_path, tensors, **config)))


@pytest.mark.parametrize("found", [False, True])
def test_tiny_numbers_are_of_the_other_type_where_that_has_usual_ones(found: bool, tmp_path: Path) -> None:
    values = (
        0.02 * torch.randn(48, 32, generator=torch.Generator().manual_seed(4))
        if found
        else torch.full((48, 32), 1 / 64)
    )
    tensors = llama() | {"lm_head.weight": values.half().view(torch.bfloat16)}
    tensors["lm_head.weight"][0, 0] *= 2

    assert ("float-type" in rules(verify(model(tmp_path, tensors, **LLAMA)))) == found


PLUS_ONE = ("gemma", "gemma2", "vaultgemma", "qwen3_next", "qwen3_5_text", "minimax_m3_vl_text")


@pytest.mark.parametrize("kind", PLUS_ONE)
def test_norms_that_count_from_one_may_be_zero(kind: str, tmp_path: Path) -> None:
    tensors = {name: tensor * ("norm" not in name) for name, tensor in llama().items()}

    report = verify(model(tmp_path, tensors, **{**LLAMA, "model_type": kind, "head_dim": 8}))

    assert "constant-values" not in rules(report)


def test_tables_of_positions_and_masks_may_repeat_and_be_copies(tmp_path: Path) -> None:
    tensors = llama()
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        tensors[f"{attention}.cos_cached"] = torch.arange(4096).reshape(64, 64).cos()
        tensors[f"{attention}.mask"] = torch.ones(64, 64).triu()

    report = verify(model(tmp_path, tensors, **LLAMA))

    assert not rules(report) & {"copied-layer", "hole", "repeated-block", "constant-values"}
