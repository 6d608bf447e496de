"""Opening of checkpoints: each file is read once, and errors are raised or collected."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qload.checkpoint import Checkpoint, open_checkpoint
from qload.detect import config_reader, loader_from_config
from qload.errors import ArgumentError, ConfigError, QloadError, StorageError
from qload.storage.safetensors import SafetensorsStorage
from qload.testing import assert_same_bits, make_checkpoint

pytestmark = pytest.mark.usefixtures("seen_texts")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
PREFIX = "model.layers.0.mlp.down_proj"


def break_index(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"lost.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def break_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def change_config(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))


def break_config(folder: Path) -> None:
    change_config(folder, quantization_config={**GPTQ, "bits": 5})


def contradict_config(folder: Path) -> None:
    (folder / "quantize_config.json").write_text(json.dumps({**GPTQ, "bits": 8}))


FAULTS = [break_index, break_header, break_config, contradict_config]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_error_that_is_raised_is_the_first_collected_one(fault: Any, tmp_path: Path) -> None:
    make_checkpoint("gptq", tmp_path)
    fault(tmp_path)

    with Checkpoint.open(tmp_path, collect=True) as collected:
        errors = collected.errors
    with pytest.raises(QloadError) as raised:
        open_checkpoint(tmp_path)

    assert not collected.is_readable
    assert str(raised.value) == str(errors[0])


def test_errors_of_headers_and_of_the_config_are_collected_together(tmp_path: Path) -> None:
    make_checkpoint("gptq", tmp_path)
    break_header(tmp_path)
    break_config(tmp_path)

    with Checkpoint.open(tmp_path, collect=True) as checkpoint:
        assert list(map(type, checkpoint.errors)) == [StorageError, ConfigError]


def test_every_config_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("gptq", tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ))
    read, read_json = list[str](), config_reader.read_json

    def record(path: Path) -> dict[str, Any]:
        read.append(path.name)
        return read_json(path)

    monkeypatch.setattr(config_reader, "read_json", record)
    with open_checkpoint(tmp_path, target="auto"):
        pass

    assert sorted(read) == ["config.json", "quantize_config.json"]


def test_quantization_configs_are_not_read_beside_a_loader(tmp_path: Path) -> None:
    make_checkpoint("gptq", tmp_path)
    with Checkpoint.open(tmp_path) as judged:
        weight = judged.weights.get_weights(PREFIX)
    break_config(tmp_path)
    contradict_config(tmp_path)

    with Checkpoint.open(tmp_path, loader=loader_from_config(GPTQ)) as checkpoint:
        assert (checkpoint.claims, checkpoint.configs) == (None, [])
        assert checkpoint.weights.architecture is checkpoint.architecture is not None
        assert_same_bits(checkpoint.weights.get_weights(PREFIX).dequantize(), weight.dequantize())


@pytest.mark.parametrize("options", [{"device": "warp"}, {"dtype": torch.int8}])
def test_files_are_closed_where_opening_fails(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("gptq", tmp_path)
    closed = list[SafetensorsStorage]()
    monkeypatch.setattr(SafetensorsStorage, "close", lambda storage: closed.append(storage))

    with pytest.raises(ArgumentError):
        open_checkpoint(tmp_path, **options)

    assert len(closed) == 1


def test_views_for_ranks_share_the_files_and_the_loader(tmp_path: Path) -> None:
    make_checkpoint("gptq", tmp_path)

    with Checkpoint.open(tmp_path) as checkpoint:
        first, second = (checkpoint.weights_for(dtype=dtype) for dtype in (None, torch.float16))

    assert first.storage is second.storage
    assert (first.loader, first.architecture) == (second.loader, checkpoint.architecture)
    assert (first.dtype, second.dtype) == (None, torch.float16)


@pytest.mark.parametrize(
    ("name", "kind", "vocabulary", "is_tied"),
    [("qwen2_q8_0", "qwen2", 64, True), ("qwen3_moe_q8_0", "qwen3_moe", 64, False)],
)
def test_a_gguf_file_tells_the_config_of_its_model(
    name: str, kind: str, vocabulary: int, is_tied: bool, fixtures: Path
) -> None:
    with Checkpoint.open(fixtures / "gguf" / name) as checkpoint:
        config = checkpoint.model_config
        (found,) = checkpoint.configs

    assert (config["model_type"], config["vocab_size"]) == (kind, vocabulary)
    assert config["tie_word_embeddings"] is is_tied
    assert (found.file, found.values) == ("model.gguf", {"quant_method": "gguf"})
