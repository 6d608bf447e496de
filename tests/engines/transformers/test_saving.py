"""Models that are saved in the format of their checkpoint, tensor by tensor.

Collected where transformers is installed.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload import Fp8Quantizer
from qload.engines.transformers import QloadConfig
from qload.errors import ArgumentError
from tests.engines.transformers.models import Stored, logits, shared
from tests.engines.transformers.tiny_types import stored_type

TIED: dict[str, Any] = {"tie_word_embeddings": True}
EXTRA = "model.layers.9.mtp.norm.weight"  # a tensor that the model has no place for


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same_bytes(one: Tensor, other: Tensor) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def in_two_files(stored: Stored, folder: Path) -> Stored:
    """The same checkpoint in two files with an index, and one tensor more."""
    shutil.copytree(stored.path, folder)
    tensors = {**load_file(folder / "model.safetensors"), EXTRA: torch.ones(3)}
    (folder / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for number, own in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(own, file)
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return Stored(folder, stored.means)


@pytest.mark.parametrize(
    "stored",
    [
        lambda: shared("llama", "gptq", **TIED),
        lambda: shared("qwen2", "awq", **TIED),
        lambda: shared("mixtral", "fp8 block"),
        lambda: stored_type("nemotron_h", "w4a16"),
        lambda: stored_type("granitemoe", "fp8 block", stacks=True),
    ],
    ids=["biases", "biases of the checkpoint", "experts", "experts of a class", "stacks"],
)
def test_a_saved_model_has_the_tensors_of_its_checkpoint(stored: Any, tmp_path: Path) -> None:
    source: Stored = stored()
    model = source.load()

    model.save_pretrained(tmp_path / "saved")

    before, after = tensors_of(source.path), tensors_of(tmp_path / "saved")
    assert before.keys() == after.keys()
    floats = (torch.float16, torch.bfloat16, torch.float32)
    plain = {name for name in before if before[name].dtype in floats}
    assert [name for name in before.keys() - plain if not same_bytes(before[name], after[name])] == []
    assert [name for name in plain if not torch.equal(before[name].float(), after[name].float())] == []
    configs = (json.loads((each / "config.json").read_text()) for each in (source.path, tmp_path / "saved"))
    first, second = (config["quantization_config"] for config in configs)
    assert first == second
    assert torch.equal(logits(Stored(tmp_path / "saved", source.means).load()), logits(model))


def test_files_tensors_without_a_place_and_trained_values_are_saved(tmp_path: Path) -> None:
    source = in_two_files(shared("qwen2", "awq", **TIED), tmp_path / "source")
    model = source.load()
    with torch.no_grad():
        model.model.norm.weight.fill_(2.0)
        model.model.layers[0].self_attn.q_proj.bias.fill_(3.0)

    model.save_pretrained(tmp_path / "saved")

    names = sorted(file.name for file in (tmp_path / "saved").iterdir())
    assert names == sorted(
        {*(file.name for file in source.path.iterdir()), "generation_config.json", "config.json"}
    )
    before, after = tensors_of(source.path), tensors_of(tmp_path / "saved")
    assert after["model.norm.weight"].tolist() == [2.0] * len(after["model.norm.weight"])
    assert set(after["model.layers.0.self_attn.q_proj.bias"].tolist()) == {3.0}
    assert torch.equal(after[EXTRA], before[EXTRA])
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    assert torch.equal(logits(Stored(tmp_path / "saved", source.means).load()), logits(model))


def test_a_section_in_a_file_of_its_own_stays_there(tmp_path: Path) -> None:
    source = shutil.copytree(shared("llama", "gptq", **TIED).path, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (source / "config.json").write_text(json.dumps(config))
    model = Stored(source, source).load()

    model.save_pretrained(tmp_path / "saved")

    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert torch.equal(logits(Stored(tmp_path / "saved", source).load()), logits(model))


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    source = in_two_files(shared("llama", "gptq", **TIED), tmp_path / "source")
    model = source.load()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("kept")

    with pytest.raises(ArgumentError, match=r"save_directory\n  expected an empty folder"):
        model.save_pretrained(tmp_path / "full")
    undivided = (
        r"variant\n  expected no value: files are divided as those of the checkpoint\n  got      'fp16'"
    )
    with pytest.raises(ArgumentError, match=undivided):
        model.save_pretrained(tmp_path / "saved", variant="fp16")
    model.save_pretrained(tmp_path / "saved", is_main_process=False)
    file = sorted(source.path.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file({**tensors, name: torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(ArgumentError, match=rf"checkpoint\n  expected {name} as the model was loaded"):
        model.save_pretrained(tmp_path / "saved")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["full", "source"]
    assert [each.name for each in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_model_that_the_load_quantized_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = shared("llama", "gptq", **TIED).means
    model = Stored(plain, plain).load(quantization_config=QloadConfig(Fp8Quantizer()))

    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")
    assert "weights were quantized by the load" in caplog.text
