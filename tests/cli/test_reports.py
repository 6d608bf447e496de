"""Whole reports of verbs as golden text: the exit code, tables or JSON, and the summary on standard error."""

import json
import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from qload.native.modules import NativeModule
from qload.testing.tiny_checkpoint import make_checkpoint
from tests.cli.test_several import run
from tests.paths import FIXTURES
from tests.pictures.test_html_pages import tables

Tensors = dict[str, Tensor]
Config = dict[str, Any]
Q, K, UP = (f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"))
NORM = "model.layers.0.input_layernorm.weight"
# Names in the commands: a dialect of make_checkpoint and a model type, or a fixture.
MADE = {
    "gptq": ("gptq", "llama"),
    "act-order": ("gptq-act-order", "llama"),
    "8-bit": ("gptq-8bit", "llama"),
    "awq": ("awq", "llama"),
    "fp8": ("fp8-block", "qwen3"),
    "plain": ("plain", "llama"),
    "mixtral": ("gptq", "mixtral"),
    "deepseek": ("fp8-block", "deepseek_v3"),
}
STORED = {
    "oss": "models/mxfp4_gpt_oss",
    "static": "activations/w8a8_int8_tensor_static_asym",
    "mixed": "auto_round/auto_gptq_w8_g32_sym_mixed",
    "refused": "refused/gptq_p_b4_g128_sym",
    "dialect": "refused/awq_gemv_g32_256x96",
}


def with_faults(tensors: Tensors, config: Config) -> None:
    """Damage values of two layers, and let the config contradict the others."""
    tensors[f"{Q}.scales"][0, 0] = float("nan")
    tensors[f"{K}.qzeros"] += 0x11111111
    config["quantization_config"]["sym"] = False
    config["num_hidden_layers"] = 2
    config["hidden_size"] = 256


def with_changes(tensors: Tensors, config: Config) -> None:
    """Change codes and scales, drop one layer and add another."""
    tensors[f"{Q}.qweight"][1, 2] += 1
    tensors[f"{K}.scales"] *= 2
    tensors[NORM][5:] += 1
    tensors["extra.weight"] = torch.ones(2, 3)
    for name in [name for name in tensors if name.startswith(UP)]:
        del tensors[name]


def with_fp16(tensors: Tensors, config: Config) -> None:
    """Round to float16, which cannot hold some values of bfloat16."""
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.float16)
    tensors[NORM] = torch.full((128,), 2.0**-30, dtype=torch.bfloat16)


def without_a_layer(tensors: Tensors, config: Config) -> None:
    """Drop a tensor of a layer, and give another one a wrong shape."""
    del tensors[f"{Q}.scales"]
    tensors[f"{K}.scales"] = tensors[f"{K}.scales"][:-1].contiguous()


CHANGED: dict[str, tuple[str, Callable[[Tensors, Config], None]]] = {
    "faulty": ("gptq", with_faults),
    "changed": ("gptq", with_changes),
    "fp16": ("plain", with_fp16),
    "broken": ("gptq", without_a_layer),
}
COMMANDS = (
    "inspect gptq --table",
    "inspect faulty oss missing --all --table",
    "inspect static mixed dialect --table",
    "inspect plain --table",
    "inspect awq --json",
    "inspect static --json",
    "verify faulty --table",
    "verify faulty --json",
    "verify broken --table",
    "verify refused --table",
    "verify changed --against gptq --table",
    "verify mixtral --tp 2,3,8 --table",
    "verify oss --tp 3 --json",
    "diff gptq changed --table",
    "diff gptq changed --json",
    "diff plain fp16 --table",
    "diff fp16 plain --json",
    "diff gptq awq --table",
    "diff broken gptq --table",
    "diff gptq missing --json",
    "diff refused gptq --table",
    "convert gptq --to awq -o out --table",
    "convert act-order --to awq -o out --table",
    "convert act-order --to bf16 -o out --json",
    "convert awq --to compressed-tensors --keep *.q_proj -o out --json",
    "convert awq --to fp16 --round -o out --table",
    "convert faulty --to awq -o out --table",
    "convert faulty --to awq --accept layer-count --accept architecture-shape -o out --json",
    "convert plain --to gptq -o out --table",
    "convert deepseek --to bf16 -o out --table",
    "convert gptq --to marlin_24 -o out --table",
    "convert 8-bit --to awq -o out --table",
    "convert fp8 --to fp8 -o out --json",
    "convert act-order --to compressed-tensors --keep *.q_proj -o out --json",
    "convert static --to fp8 -o out --table",
    "convert oss --to gptq -o out --table",
    "convert missing --to awq -o out --json",
    "shard gptq --tp 2 -o out --json",
    "shard mixtral --tp 4 --ep 2 -o out --table",
    "shard mixtral --tp 3 -o out --table",
    "shard refused --tp 2 -o out --table",
    "plan mixtral --tp 1,2,3,8 --table",
    "plan mixtral --tp 4 --ep 4 --json",
    "plan gptq --tp 2,3 --kernel marlin --json",
    "plan awq --tp 16,3 --kernel exllama --all --table",
    "plan deepseek --tp 2,3,5 --table",
    "plan oss --tp 2,3 --table",
    "plan broken --tp 1,2 --table",
    "plan dialect --table",
    "explain gptq --arch sm90 --table",
    "explain act-order --arch sm80 --tp 2 --table",
    "explain awq --arch cpu --tokens 1,7 --dtype bf16 --json",
    "explain fp8 --arch sm90 --tokens 1,64 --table",
    "explain 8-bit --arch sm75 --dtype fp16 --tokens 3 --table",
    "explain broken --arch cpu --tokens 1 --all --table",
    "explain mixtral --arch cpu --tp 3 --tokens 1 --table",
    "explain deepseek --arch sm90 --tp 2 --tokens 1 --all --table",
    "explain missing --arch cpu --json",
)
WIDE = ("inspect mixed mixtral --table", "verify faulty --table", "verify mixtral --tp 3 --table")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all checkpoints."""
    root = tmp_path_factory.mktemp("reports")
    for name, (dialect, model) in MADE.items():
        make_checkpoint(dialect, root / name, model=model, config={"num_hidden_layers": 1})
    for name, path in STORED.items():
        shutil.copytree(FIXTURES / path, root / name)
    for name, (source, change) in CHANGED.items():
        tensors = make_checkpoint(source, root / name, config={"num_hidden_layers": 1})
        config = json.loads((root / name / "config.json").read_text())
        change(tensors, config)
        save_file(tensors, root / name / "model.safetensors")
        (root / name / "config.json").write_text(json.dumps(config))
    return root


def compact(text: str) -> str:
    """Write an object of JSON with a line for each entry, and for each element of its lists."""
    lines = []
    for key, value in json.loads(text).items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"  {json.dumps(each)}" for each in value)]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join(lines)


@pytest.fixture(autouse=True)
def current_folder(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter a new folder with links to all checkpoints, on a machine without the CPU module."""
    module = NativeModule(None, "not built")
    monkeypatch.setattr(import_module("qload.plan.kernels"), "load", lambda name: module)
    for folder in folders.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "width"), [*((command, 110) for command in COMMANDS), *((command, 200) for command in WIDE)]
)
def test_the_report_of(
    command: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: SnapshotAssertion
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))

    result = run(*command.split())

    printed = compact(result.stdout) if command.endswith("--json") and result.stdout else result.stdout
    text = f"{result.exit_code}\n{printed}\n---\n{result.stderr}"
    assert text.replace(str(tmp_path), "TMP") == golden


@pytest.mark.parametrize(
    "command",
    [
        "verify faulty --html page.html",
        "verify broken --against gptq --html page.html",
        "explain act-order --arch sm90 --tokens 1,64 --html page.html",
        "explain dialect --arch cpu --html page.html",
    ],
)
def test_the_page_of(command: str, tmp_path: Path, golden: SnapshotAssertion) -> None:
    run(*command.split())

    text = (tmp_path / "page.html").read_text()
    shown = re.sub(r"<(style|script|svg|article)\b.*?</\1>|<meta[^>]*>", "", text, flags=re.DOTALL)
    rows = [json.dumps(row) for table in tables(text) for row in (table["columns"], *table["rows"])]
    assert "\n".join([*(line for line in shown.splitlines() if line.strip()), *rows]) == golden
