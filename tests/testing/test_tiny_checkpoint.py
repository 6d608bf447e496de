"""Made checkpoints: sound ones, of every dialect and type of model, whose values tell where they lie."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from qload import convert, layers, verify
from qload.errors import ArgumentError
from qload.models import FAMILIES, load_model
from qload.testing import make_checkpoint
from qload.testing.tiny_checkpoint import DIALECTS
from tests.cli.test_several import run
from tests.support.changed_values import shown

PAIRS = [(dialect, "llama") for dialect in DIALECTS] + [
    ("gptq", kind) for kind in FAMILIES if kind != "llama"
]
FORMATS = {"plain": "unquantized", "awq": "awq", "fp8-block": "fp8", "gptq-8bit": "gptq"}


@pytest.mark.parametrize(("dialect", "kind"), PAIRS)
def test_nothing_is_found_and_the_model_loads(dialect: str, kind: str, tmp_path: Path) -> None:
    make_checkpoint(dialect, tmp_path, model=kind)

    assert [*verify(tmp_path).findings] == []
    assert load_model(tmp_path).config.type == kind


@pytest.mark.parametrize(
    ("dialect", "to"), [("gptq", "awq"), ("awq", "gptq_v2"), ("gptq", "compressed-tensors")]
)
def test_nothing_is_found_in_another_format(dialect: str, to: str, tmp_path: Path) -> None:
    """Test words whose low bits do not repeat: in another order they become whole rows."""
    make_checkpoint(dialect, tmp_path / "stored")
    convert(tmp_path / "stored", tmp_path / "written", to=to)

    assert [*verify(tmp_path / "written").findings] == []


@pytest.mark.parametrize(("dialect", "format"), FORMATS.items())
def test_matrices_of_layers_are_of_the_format_and_routers_are_not(
    dialect: str, format: str, tmp_path: Path
) -> None:
    make_checkpoint(dialect, tmp_path, model="mixtral")

    found = {layer.prefix: layer.format for layer in layers(tmp_path)}
    assert (
        found["model.layers.1.block_sparse_moe.experts.3.w2"]
        == found["model.layers.0.self_attn.q_proj"]
        == format
    )
    assert found["model.layers.0.block_sparse_moe.gate"] == found["lm_head"] == "unquantized"


def test_the_same_arguments_write_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        make_checkpoint("gptq-act-order", tmp_path / name)

    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_tensors_of(dialect: str, golden: SnapshotAssertion, tmp_path: Path) -> None:
    """One layer; reports that name a made checkpoint stay reproducible with its values."""
    tensors = make_checkpoint(dialect, tmp_path, model="mixtral", config={"num_hidden_layers": 1})
    section = json.loads((tmp_path / "config.json").read_text()).get("quantization_config")
    lines = [f"{name}: {shown(tensor)}" for name, tensor in tensors.items() if "experts.1" not in name]

    assert "\n".join((str(section), *lines)) == golden


def test_no_two_words_of_a_tensor_are_equal_and_no_two_layers_alike(tmp_path: Path) -> None:
    tensors = make_checkpoint("gptq", tmp_path)

    words = [tensor for name, tensor in tensors.items() if name.endswith("qweight")]
    assert all(len(tensor.unique()) == tensor.numel() for tensor in words)
    assert len({bytes(tensor[0].numpy().tobytes()) for tensor in words}) == len(words)


def test_act_order_exchanges_rows_of_groups(tmp_path: Path) -> None:
    drawn = make_checkpoint("gptq-act-order", tmp_path)

    name = "model.layers.0.self_attn.q_proj.g_idx"
    assert not torch.equal(drawn[name], torch.arange(128) // 64)
    assert torch.equal(drawn[name].sort().values, torch.arange(128).int() // 64)
    assert torch.equal(drawn[name], drawn[name.replace("q_proj", "v_proj")])


def test_zero_points_of_a_symmetric_dialect_are_its_middle_by_hand(tmp_path: Path) -> None:
    stored = {
        name: next(t for n, t in make_checkpoint(name, tmp_path / name).items() if n.endswith("qzeros"))
        for name in ("gptq", "gptq-v2", "gptq-8bit")
    }

    assert {name: hex(int(tensor.unique()) % 2**32) for name, tensor in stored.items()} == {
        "gptq": "0x77777777",
        "gptq-v2": "0x88888888",
        "gptq-8bit": "0x7f7f7f7f",
    }


def test_entries_of_the_config_can_be_said(tmp_path: Path) -> None:
    tensors = make_checkpoint("plain", tmp_path, config={"num_hidden_layers": 1})

    assert not any(".layers.1." in name for name in tensors)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 1


@pytest.mark.parametrize(
    "asked",
    [
        {"format": "ggml"},
        {"model": "gpt2"},
        {"config": {"hidden_size": 100}},
        {"config": 1},
        {"config": {"num_hidden_layers": -1}},
        {"config": {"vocab_size": "x"}},
        {"config": {"num_attention_heads": 0}},
    ],
)
def test_what_cannot_be_made_is_an_argument_error(asked: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError):
        make_checkpoint(**{"format": "gptq", "folder": tmp_path / "made", **asked})
    assert not (tmp_path / "made").exists()


def test_the_command_makes_it_and_leaves_a_folder_with_anything_in_it_alone(tmp_path: Path) -> None:
    made = tmp_path / "made"

    assert run("make-checkpoint", "awq", "-o", made, "--config", '{"num_hidden_layers": 1}').exit_code == 0
    before = (made / "model.safetensors").read_bytes()
    assert run("make-checkpoint", "gptq", "-o", made).exit_code == 2
    assert (made / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "asked",
    [["--config", "["], ["--config", "1"], ["--config", '{"vocab_size": 0}'], ["--model", "gpt2"], ["ggml"]],
)
def test_what_the_command_does_not_know_is_a_usage_error(asked: list[str], tmp_path: Path) -> None:
    formats = [] if asked == ["ggml"] else ["gptq"]

    assert run("make-checkpoint", *formats, *asked, "-o", tmp_path / "made").exit_code == 2
