"""Complete models saved with a PEFT wrapper: no finding, and one note on the adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import open_checkpoint
from qload.errors import MismatchError
from qload.models import load_model
from qload.verify import verify
from tests.verify.checkpoints import GPTQ, gptq, model, rules
from tests.verify.rules.test_architecture import CONFIG, whole

pytestmark = pytest.mark.usefixtures("seen_texts")

WRAPPER = "base_model.model."
RANK = 2


def wrapped(kind: str) -> dict[str, Tensor]:
    """Return a Llama with LoRA on q_proj and v_proj of two layers, under current or former names of PEFT."""
    tensors = whole()
    for layer in range(2):
        for name in ("q_proj", "v_proj"):
            prefix = f"model.layers.{layer}.self_attn.{name}"
            weight = tensors.pop(f"{prefix}.weight")
            base = f"{prefix}.weight" if kind == "old" else f"{prefix}.base_layer.weight"
            middle = "" if kind == "bare" else ".default"
            tensors[base] = weight
            tensors[f"{prefix}.lora_A{middle}.weight"] = torch.randn(RANK, weight.shape[1])
            tensors[f"{prefix}.lora_B{middle}.weight"] = torch.zeros(
                weight.shape[0], RANK
            )  # initial values of training
    if kind == "dora":
        vector = torch.rand(16)
        tensors["model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight"] = vector
    if kind == "embedding":
        weight = tensors.pop("model.embed_tokens.weight")
        tensors["model.embed_tokens.base_layer.weight"] = weight
        tensors["model.embed_tokens.lora_embedding_A.default"] = torch.randn(RANK, len(weight))
        tensors["model.embed_tokens.lora_embedding_B.default"] = torch.randn(weight.shape[1], RANK)
    if kind == "saved":
        head = tensors.pop("lm_head.weight")
        tensors["lm_head.original_module.weight"] = head
        tensors["lm_head.modules_to_save.default.weight"] = head + torch.randn(head.shape)
    lead = WRAPPER if kind == "wrapped" else ""
    return {f"{lead}{name}": tensor for name, tensor in tensors.items()}


KINDS = ["inner", "wrapped", "bare", "old", "dora", "embedding", "saved"]


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_one_note_and_nothing_is_missed(kind: str, tmp_path: Path) -> None:
    report = verify(model(tmp_path, wrapped(kind), **CONFIG))

    lead = WRAPPER if kind == "wrapped" else ""
    first = "model.embed_tokens" if kind == "embedding" else "model.layers.0.self_attn.q_proj"
    base = first if kind == "old" else f"{first}.base_layer"
    assert report.findings == ()
    (note,) = report.notes
    assert note.startswith(f"{lead}{first}.lora_")
    assert f" is an unmerged adapter of {lead}{base}, one of " in note
    assert note.endswith("or load the base and the adapter")


@pytest.mark.parametrize(
    "lost", ["self_attn.q_proj.base_layer.weight", "mlp.up_proj.weight", "input_layernorm.weight"]
)
def test_what_a_wrapped_model_lost_is_found(lost: str, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in wrapped("wrapped").items() if not name.endswith(lost)}

    found = rules(verify(model(tmp_path, tensors, **CONFIG)))

    assert found & {"architecture-missing", "missing-sibling"}


def test_a_matrix_of_another_shape_under_a_wrapper_is_found(tmp_path: Path) -> None:
    tensors = wrapped("wrapped")
    tensors[f"{WRAPPER}model.layers.0.self_attn.q_proj.base_layer.weight"] = torch.randn(8, 16)

    assert rules(verify(model(tmp_path, tensors, **CONFIG))) == {"architecture-shape"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_not_run_without_what_it_learned(kind: str, tmp_path: Path) -> None:
    folder = model(tmp_path, wrapped(kind), **CONFIG)

    with pytest.raises(MismatchError, match="is an unmerged adapter of"):
        load_model(folder)


@pytest.mark.parametrize("lead", ["", WRAPPER])
def test_a_quantized_layer_under_a_wrapper_is_loaded_by_its_stored_name(lead: str, tmp_path: Path) -> None:
    prefix = f"{lead}model.layers.0.self_attn.q_proj"
    tensors: dict[str, Any] = {
        **gptq(f"{prefix}.base_layer", zero=7),
        f"{prefix}.lora_A.default.weight": torch.randn(2, 16),
        f"{prefix}.lora_B.default.weight": torch.randn(8, 2),
    }
    folder = model(tmp_path, tensors, quantization_config=GPTQ)

    with open_checkpoint(folder) as weights:
        weight = weights.get_weights(f"{prefix}.base_layer").dequantize()

    assert torch.equal(weight, torch.full((8, 16), -8.0))  # (code 0 - (stored 7 + 1)) * scale 1


def test_a_type_of_model_that_has_adapters_of_its_own_is_told_nothing(tmp_path: Path) -> None:
    report = verify(model(tmp_path, wrapped("inner"), **{**CONFIG, "model_type": "phi4mm"}))

    assert not any("adapter" in note for note in report.notes)
