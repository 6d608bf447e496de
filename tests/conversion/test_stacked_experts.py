"""Conversion of experts in one tensor to plain weights in one tensor, at each expert's expected location."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qload import convert, diff, open_checkpoint, verify
from qload.conversion.output_files import STACKED
from qload.errors import ArgumentError
from tests.conversion.drawn_models import checkpoint
from tests.paths import FIXTURES

pytestmark = pytest.mark.usefixtures("seen_texts")

SOURCE = FIXTURES / "models" / "mxfp4_gpt_oss"
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a writable copy."""
    return Path(shutil.copytree(SOURCE, tmp_path / "in"))


def changed(folder: Path, **tensors: torch.Tensor) -> Path:
    (file,) = folder.glob("*.safetensors")
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("to", ["bfloat16", "float32"])
def test_each_expert_lies_where_transformers_has_it(to: str, tmp_path: Path) -> None:
    """Source: transformers' GptOssExperts: (experts, inputs, outputs), gate and up interleaved."""
    assert convert(SOURCE, tmp_path / "out", to=to).counts.keys() == {"bits"}
    stored = load_file(tmp_path / "out" / "model.safetensors")
    both, down = stored[f"{EXPERTS}.gate_up_proj"], stored[f"{EXPERTS}.down_proj"]

    with open_checkpoint(SOURCE) as weights:
        for expert in range(4):
            gate, up, out = (
                weights.get_weights(f"{EXPERTS}.{expert}.{name}").dequantize()
                for name in ("gate_proj", "up_proj", "down_proj")
            )
            assert torch.equal(both[expert, :, 0::2].float(), gate.T)
            assert torch.equal(both[expert, :, 1::2].float(), up.T)
            assert torch.equal(down[expert].float(), out.T)
    assert both.dtype == down.dtype == getattr(torch, to)


def test_what_lies_beside_is_copied_and_the_rest_is_as_new(tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "out", to="bfloat16")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    (file,) = SOURCE.glob("*.safetensors")
    before = load_file(file)

    assert stored.keys() - before.keys() == {
        f"model.layers.{at}.mlp.experts.{name}" for at in (0, 1) for name in ("gate_up_proj", "down_proj")
    }
    assert {name.rpartition("_")[2] for name in before.keys() - stored.keys()} == {"blocks", "scales"}
    assert all(torch.equal(stored[name], before[name]) for name in stored.keys() & before.keys())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert verify(tmp_path / "out").verdict == "ok"


def test_an_expert_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[torch.Size] = []
    conversion = import_module("qload.conversion.stacked_experts")
    fill = conversion._fill_slot
    monkeypatch.setattr(
        conversion, "_fill_slot", lambda block, *rest: (filled.append(block.shape), fill(block, *rest))
    )
    convert(SOURCE, tmp_path / "out", to="bfloat16")

    assert {*filled} == {torch.Size([64, 192]), torch.Size([96, 64])}
    assert len(filled) == 2 * 4 * 3


def test_a_stack_of_which_an_expert_stays_is_refused(tmp_path: Path) -> None:
    found = convert(SOURCE, tmp_path / "out", to="bfloat16", keep=[f"{EXPERTS}.2.gate_proj"])

    assert found.verdict == "findings"
    reasons = {layer.name: layer.detail for layer in found.layers}
    kept = reasons.pop(f"{EXPERTS}.2.gate_proj")  # no config has this layer among plain ones
    assert STACKED not in kept
    assert reasons.keys() == {
        f"{EXPERTS}.{e}.{name}_proj" for e in range(4) for name in ("gate", "up") if (e, name) != (2, "gate")
    }
    assert all(reason.endswith(STACKED) for reason in reasons.values())
    assert not (tmp_path / "out").exists()


def test_a_stack_whose_name_is_taken_is_refused(source: Path, tmp_path: Path) -> None:
    changed(source, **{f"{EXPERTS}.down_proj": torch.zeros(3)})
    found = convert(source, tmp_path / "out", to="bfloat16")

    assert found.verdict == "findings"
    assert not (tmp_path / "out").exists()


def test_a_stack_that_nothing_would_find_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        import_module("qload.conversion.stacked_experts"), "find_stacks", lambda storage, config: []
    )
    found = convert(SOURCE, tmp_path / "out", to="bfloat16")

    assert {layer.outcome for layer in found.layers} == {"refused"}
    assert len(found.layers) == 24


def test_other_targets_have_no_stacks(tmp_path: Path) -> None:
    assert convert(SOURCE, tmp_path / "gptq", to="gptq").verdict == "findings"
    assert convert(SOURCE, tmp_path / "fp8", to="fp8").counts.keys() == {"bits"}

    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    assert f"{EXPERTS}.0.up_proj.weight" in stored
    assert f"{EXPERTS}.gate_up_proj_bias" not in stored


def test_the_first_run_is_gone_on_with(tmp_path: Path) -> None:
    """The first run and the second one write the same bytes."""
    for name in ("one", "two"):
        convert(SOURCE, tmp_path / name, to="bfloat16")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))

    assert one == two
    with pytest.raises(ArgumentError):
        convert(SOURCE, tmp_path / "one", to="bfloat16")


def test_scales_in_one_tensor_go_with_experts_that_are_tensors_apart(tmp_path: Path) -> None:
    """Transformers saves FP8 in this form: the weight of each expert, and the scales of all in one tensor."""
    source = FIXTURES / "experts" / "model_fp8_joined_qwen3_moe"
    found = convert(source, tmp_path / "out", to="float32")
    stored = load_file(tmp_path / "out" / "model.safetensors")

    assert found.counts.keys() == {"bits"}
    assert {name for name in stored if ".experts." in name} == {
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
        for expert in range(2)
        for part in ("gate", "up", "down")
    }
    assert diff(source, tmp_path / "out").verdict == "ok"


def test_of_such_experts_none_is_kept_alone(tmp_path: Path) -> None:
    source = FIXTURES / "experts" / "model_fp8_joined_qwen3_moe"
    found = convert(source, tmp_path / "out", to="float32", keep=["*.experts.0.down_proj"])

    details = {layer.name.rpartition("experts.")[2]: layer.detail for layer in found.layers}
    assert "another dialect of fp8" in details["0.down_proj"]
    assert "is stored in one tensor with other experts" in details["1.down_proj"]


def test_a_scale_that_means_nothing_beside_a_plain_weight_is_left_out(tmp_path: Path) -> None:
    """Transformers saves scales of unquantized weights; without its config, no reader uses them."""
    source = FIXTURES / "experts" / "model_fp8_joined_qwen3_moe"
    name = "model.layers.0.self_attn.k_proj.weight_scale_inv"
    assert name in load_file(source / "model.safetensors")

    found = convert(source, tmp_path / "out", to="float32")

    assert found.verdict == "ok"
    assert f"such as {name}" in " ".join(found.notes)
    assert not any("scale" in name for name in load_file(tmp_path / "out" / "model.safetensors"))


@pytest.mark.parametrize("to", ["mxfp4", "mxfp4_deepseek", "mxfp4_mlx", "mxfp4_quark"])
def test_stacks_of_gpt_oss_are_split_and_joined_again(to: str, tmp_path: Path) -> None:
    """Codes, exponents and biases of all experts come back byte for byte."""
    apart, back = tmp_path / "apart", tmp_path / "back"

    assert convert(SOURCE, apart, to=to).counts.keys() == {"bits"}
    assert convert(apart, back, to="mxfp4_gpt_oss").counts.keys() == {"bits"}

    (file,) = SOURCE.glob("*.safetensors")
    before, between, after = (
        load_file(path) for path in (file, apart / "model.safetensors", back / "model.safetensors")
    )
    assert f"{EXPERTS}.3.gate_proj.bias" in between
    assert not [name for name in between if name.endswith(("_blocks", "_scales", "_proj_bias"))]
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)
    config = json.loads((back / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4"
    assert f"{EXPERTS.removesuffix('.experts')}.router" in config["modules_to_not_convert"]


def test_a_stack_of_gpt_oss_needs_all_experts(tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    convert(SOURCE, apart, to="mxfp4")

    found = convert(apart, tmp_path / "back", to="mxfp4_gpt_oss", keep=[f"{EXPERTS}.2.gate_proj"])

    reasons = {layer.name for layer in found.layers if "gpt-oss stacks gate_proj" in layer.detail}
    others = {f"{EXPERTS}.{e}.{name}_proj" for e in range(4) for name in ("gate", "up")}
    assert reasons == others - {f"{EXPERTS}.2.gate_proj"}


def test_experts_of_other_models_have_no_stacks_of_gpt_oss(tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    convert(SOURCE, apart, to="mxfp4")
    config = json.loads((apart / "config.json").read_text())
    (apart / "config.json").write_text(json.dumps({**config, "model_type": "other"}))

    found = convert(apart, tmp_path / "back", to="mxfp4_gpt_oss")

    assert len(found.layers) == 24
    assert all("or the model_type is not gpt_oss" in layer.detail for layer in found.layers)


def test_a_stack_of_gpt_oss_is_of_no_other_model(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "qwen3_moe", "MXFP4")

    found = convert(source, tmp_path / "out", to="mxfp4_gpt_oss", keep=["*.self_attn.*"])

    experts = {layer.name for layer in found.layers if "is not gpt_oss" in layer.detail}
    assert "model.layers.0.mlp.experts.2.down_proj" in experts
