"""Experts as their owners' tools wrote them: clean, explained, with the owners' numbers, whole and cut."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload.checkpoint import layers, open_checkpoint
from qload.experts import with_experts
from qload.storage import MemoryStorage, SafetensorsStorage
from qload.verify import inspect, verify
from tests.cases.test_models import assert_rounded, last_experts, shared
from tests.experts.mixtures import CONFIGS, KINDS, E, config, drawn, lead, mixture
from tests.format_cases import lawful
from tests.paths import FIXTURES, cases

FOLDERS = cases("experts")
CONFIG = {"quantization_config": CONFIGS["fp8_block"]}
every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def config_of(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return read


def last_expert(folder: Path) -> dict[str, Tensor]:
    """(N, K) of each part of the last expert, by its prefix."""
    return last_experts(config_of(folder), load_file(folder / "expected" / "expected.safetensors"))


@every_folder
def test_a_mixture_is_clean_and_all_of_it_is_explained(folder: Path) -> None:
    listed, config = layers(folder), config_of(folder)

    for report in (inspect(folder), verify(folder), verify(folder, against=folder)):
        assert report.findings == ()
        assert report.coverage is not None
        with SafetensorsStorage(folder) as storage:
            held = sum(storage.info(name).nbytes for name in storage.keys())  # noqa: SIM118
        assert report.coverage.explained == report.coverage.total == held
    experts = [layer for layer in listed if ".experts." in layer.prefix]
    assert len(experts) == 3 * config["num_local_experts"]
    assert not any(layer.plain for layer in experts)
    assert all(layer.shape == layer.expected for layer in experts)


def test_blocks_after_a_dot_are_the_same_experts(tmp_path: Path) -> None:
    folder, experts = FIXTURES / "models" / "mxfp4_gpt_oss", "model.layers.1.mlp.experts"
    stored = load_file(folder / "model.safetensors")
    dotted = {re.sub("_(blocks|scales)$", r".\1", name): tensor for name, tensor in stored.items()}
    save_file(dotted, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())

    assert verify(tmp_path).findings == ()
    with open_checkpoint(folder) as owner, open_checkpoint(tmp_path) as weights:
        wanted, got = (each.get_experts(experts).dequantize(3) for each in (owner, weights))
        for want, matrix in zip(wanted, got, strict=True):
            assert torch.equal(want, matrix)


@every_folder
def test_ranks_are_told_which_experts_they_cannot_share(folder: Path) -> None:
    """Along N and K of each expert's matrices, as of any other."""
    found = {finding.tensor or "" for finding in verify(folder, tp=2, tier="headers").findings}
    refused = set()
    for layer in layers(folder):
        if ".experts." in layer.prefix:
            assert layer.config is not None
            dim = "K" if layer.prefix.endswith("down_proj") else "N"
            if not lawful(layer.config, dim, layer.shape["NK".index(dim)], 2, layer.shape[1]):
                refused.add(layer.prefix)

    assert {name.rpartition(".")[0] for name in found if ".experts." in name} == refused


@pytest.mark.parametrize(
    "folder", [f for f in FOLDERS if (f / "expected").is_dir()], ids=lambda folder: folder.name
)
def test_the_last_expert_has_its_owners_numbers_whole_and_cut(folder: Path) -> None:
    with open_checkpoint(folder) as weights:
        for prefix, want in last_expert(folder).items():
            weight = weights.get_weights(prefix)
            assert_rounded(weight.dequantize(), want)
            for dim, world, parts in shared(weights, weight, prefix):
                axis = "NK".index(dim) - 2
                assert (parts is not None) == lawful(
                    weight.config, dim, want.shape[axis], world, want.shape[-1]
                )
                assert parts is None or torch.equal(torch.cat(parts, axis), weight.dequantize())


def test_scales_that_are_stored_together_belong_to_weights_that_are_not() -> None:
    """transformers' own save: gate's rows of scales first, then up's, for one expert after another."""
    (folder,) = (folder for folder in FOLDERS if "joined" in folder.name)
    stored, lead = load_file(folder / "model.safetensors"), "model.layers.0.mlp.experts"
    gate_up, down = (stored[f"{lead}.{name}_scale_inv"] for name in ("gate_up_proj", "down_proj"))
    rows = gate_up.shape[1] // 2
    scales = {"gate_proj": gate_up[:, :rows], "up_proj": gate_up[:, rows:], "down_proj": down}
    block = config_of(folder)["quantization_config"]["weight_block_size"]

    with open_checkpoint(folder) as weights:
        for expert in range(len(down)):
            for part, scale in scales.items():
                prefix = f"{lead}.{expert}.{part}"
                codes = stored[f"{prefix}.weight"].float()
                spread = scale[expert].repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
                want = codes * spread[: codes.shape[0], : codes.shape[1]]
                assert torch.equal(weights.get_weights(prefix).dequantize(), want)
    assert not torch.equal(scales["gate_proj"], scales["up_proj"])


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize(("inner", "rows"), [(64, 1), (96, 2), (192, 3)])
def test_scales_beside_experts_that_blocks_do_not_divide_are_not_applied(
    names: tuple[str, str, str], inner: int, rows: int, tmp_path: Path
) -> None:
    """transformers leaves these plain, and stores scales that it never filled."""
    kind, hidden = ("mixtral" if names[0] == "w1" else "qwen3_moe"), 72
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    prefixes = {
        f"{lead(kind)}.{expert}.{name}": drawn(shape, torch.bfloat16, 3 * expert + place)
        for expert in range(E)
        for place, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }
    tensors = {f"{prefix}.weight": weight for prefix, weight in prefixes.items()}
    tensors[f"{lead(kind)}.gate_up_proj_scale_inv"] = torch.full((E, rows, 1), torch.nan)
    tensors[f"{lead(kind)}.down_proj_scale_inv"] = torch.full((E, 1, -(-inner // 128)), torch.nan)
    save_file(tensors, tmp_path / "model.safetensors")
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    told = config(kind, hidden_size=hidden, quantization_config=fp8, num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps({**told, KINDS[kind].inner: inner}))

    report = verify(tmp_path)
    assert {finding.rule for finding in report.findings} <= {"architecture-missing", "claimed-method"}
    assert report.coverage is not None
    assert report.coverage.explained == report.coverage.total == sum(each.nbytes for each in tensors.values())
    with open_checkpoint(tmp_path) as weights:
        for prefix, want in prefixes.items():
            assert torch.equal(weights.get_weights(prefix).dequantize(), want.float())
        assert weights.report().complete


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "qwen3_moe", "a_type_of_no_table"])
def test_joined_scales_belong_to_experts_of_any_naming(kind: str) -> None:
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    both = mixture("qwen3_moe", "fp8_block")
    tensors = {name: tensor for name, tensor in both.stacks.items() if name.endswith("_scale_inv")}
    renamed = {}
    for name, tensor in both.each.items():
        for usual, own in zip(("gate_proj", "up_proj", "down_proj"), names, strict=True):
            if f".{usual}." in name:
                renamed[name.replace(usual, own)] = tensor
    tensors |= {name: tensor for name, tensor in renamed.items() if name.endswith(".weight")}
    told = {
        **config("qwen3_moe"),
        "model_type": kind,
        **CONFIG,
        "num_local_experts": E,
        "n_routed_experts": E,
    }

    storage = with_experts(MemoryStorage(tensors), told)

    assert sorted(storage.keys()) == sorted(renamed)
    assert all(torch.equal(storage.read(name).float(), tensor.float()) for name, tensor in renamed.items())
