"""Missing tensors by design cause a note; other missing tensors cause a finding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.verify import inspect, verify
from tests.verify.checkpoints import GPTQ, gptq, model, rules
from tests.verify.rules.test_architecture import CONFIG, LATENT, whole

pytestmark = pytest.mark.usefixtures("seen_texts")


def layers(count: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(0)
    names = ("attn.Wo.weight", "attn_norm.weight", "mlp.Wo.weight")
    return {f"model.layers.{layer}.{name}": torch.randn(4, 4) for layer in range(count) for name in names}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        pytest.param({"model_type": "modernbert"}, set(), id="a type without a table"),
        pytest.param({"_class_name": "SD3Transformer2DModel"}, set(), id="a part of diffusers"),
        pytest.param({}, {"missing-sibling"}, id="no type at all"),
    ],
)
def test_layers_of_an_unknown_type_may_differ(
    config: dict[str, Any], found: set[str], tmp_path: Path
) -> None:
    tensors = layers()
    del tensors["model.layers.0.attn_norm.weight"], tensors["model.layers.0.attn.Wo.weight"]

    report = verify(model(tmp_path, tensors, **config))

    assert rules(report) == found
    notes = [note for note in report.notes if "may differ by design" in note]
    assert [note.split(":")[0] for note in notes] == ([] if found else ["model.layers.0.attn.Wo.weight"])
    assert all(note.endswith("; 2 tensors in all") for note in notes)


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        pytest.param("model.layers.1.up.qzeros", {"missing-sibling", "missing-tensor"}, id="a part"),
        pytest.param("model.layers.1.experts.1.up.", {"missing-sibling"}, id="a matrix of an expert"),
        pytest.param("model.layers.1.down.", set(), id="a whole layer"),
    ],
)
def test_parts_of_quantized_layers_and_of_experts_are_missed_in_any_type(
    lost: str, found: set[str], tmp_path: Path
) -> None:
    tensors: dict[str, Tensor] = {}
    for layer in range(3):
        tensors |= gptq(f"model.layers.{layer}.up") | gptq(f"model.layers.{layer}.down")
        for expert in range(2):
            lead = f"model.layers.{layer}.experts.{expert}"
            tensors |= gptq(f"{lead}.up") | gptq(f"{lead}.down")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}

    report = verify(model(tmp_path, tensors, model_type="new", quantization_config=GPTQ), tier="headers")

    assert rules(report) == found


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (["LlamaForCausalLMEagle"], set()),
        (["LlamaForCausalLMEagle3"], set()),
        (["EagleLlamaForCausalLM"], set()),
        (["LlamaForCausalLM"], {"architecture-missing"}),
        (["LlamaForSequenceClassification"], {"architecture-missing"}),
        ([], {"architecture-missing"}),
        (None, {"architecture-missing"}),
        ([7], set()),
        (["AdapterMixin", "LlamaForCausalLM"], {"architecture-missing"}),
    ],
)
def test_a_draft_may_lack_what_it_takes_from_its_model(named: Any, found: set[str], tmp_path: Path) -> None:
    left_out = ("embed_tokens", "lm_head", "model.norm", "input_layernorm")
    tensors = {name: tensor for name, tensor in whole().items() if not any(map(name.count, left_out))}

    report = verify(model(tmp_path, tensors, **CONFIG, architectures=named))

    assert rules(report) == found
    notes = [note.split(":")[0] for note in report.notes if "speculative decoding" not in note]
    assert notes == ([] if found else ["model.embed_tokens"])


def test_the_only_layer_of_experts_lacks_nothing_of_the_one_that_predicts(tmp_path: Path) -> None:
    config = {**LATENT, "first_k_dense_replace": 1}
    tensors = whole(**config)
    tensors |= {
        name.replace("layers.1.", "layers.2."): torch.randn(tensor.shape)
        for name, tensor in tensors.items()
        if "layers.1." in name
    }
    tensors |= {f"model.layers.2.{name}.weight": torch.randn(16) for name in ("enorm", "hnorm")}

    assert verify(model(tmp_path, tensors, **config)).findings == ()


def test_one_file_of_several_is_judged_by_what_it_holds(tmp_path: Path) -> None:
    tensors = gptq("model.layers.0.up")
    del tensors["model.layers.0.up.scales"]
    folder = model(tmp_path, tensors, **CONFIG, quantization_config=GPTQ)
    shard = (folder / "model.safetensors").rename(folder / "model-00002-of-00003.safetensors")

    for report in (verify(shard), inspect(shard)):
        assert report.findings == ()
        assert report.notes[0].startswith("this is one file of several")

    whole_file = shard.rename(folder / "model.safetensors")
    assert {"missing-tensor", "layer-count"} <= rules(verify(whole_file))
    assert not any("one file of several" in note for note in verify(whole_file).notes)


def test_damage_inside_of_one_file_of_several_is_found(tmp_path: Path) -> None:
    tensors = {**gptq("model.layers.0.up"), "model.norm.weight": torch.full((16,), torch.nan)}
    tensors["model.layers.0.up.scales"][0] = torch.inf
    folder = model(tmp_path, tensors, **CONFIG, quantization_config=GPTQ)
    shard = (folder / "model.safetensors").rename(folder / "model-00002-of-00003.safetensors")

    assert "float-value" in rules(verify(shard))


def test_what_many_layers_have_in_common_is_one_note(tmp_path: Path) -> None:
    tensors = {}
    for layer in range(3):
        tensors |= gptq(f"model.layers.{layer}.up")
        tensors[f"model.layers.{layer}.up.qzeros"][
            :
        ] = -0x08888889  # 0xf7777777: the overflow is in the last field

    report = verify(model(tmp_path, tensors, quantization_config=GPTQ))

    (note,) = [note for note in report.notes if "without a mask" in note]
    assert note.startswith("model.layers.0.up.qzeros: 2 of 16 zero points are read as stored minus one")
    assert note.endswith("; 3 layers in all")
