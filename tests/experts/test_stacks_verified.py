"""`verify` sees each expert of a stack: what is lost, rolled or exchanged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload.verify import Report, inspect, verify
from tests.experts.mixtures import KINDS, E, config, drawn, fused, laid, lead
from tests.paths import cases
from tests.verify.checkpoints import rules

FOLDERS = {folder.name.removeprefix("model_"): folder for folder in cases("experts")}
every_folder = pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS.keys())


def changed(folder: Path, copy: Path, **config: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a folder, and what writes them to a copy of it."""
    told = {**json.loads((folder / "config.json").read_text()), **config}

    def write(tensors: dict[str, Tensor]) -> Path:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, copy / "model.safetensors")
        (copy / "config.json").write_text(json.dumps(told))
        return copy

    return load_file(folder / "model.safetensors"), write


def stacks(tensors: dict[str, Tensor], matrix: str) -> list[str]:
    """What is stacked of a matrix, but for what all experts share."""
    return [name for name, tensor in tensors.items() if f".experts.{matrix}" in name and tensor.ndim]


@pytest.mark.parametrize("name", ["mxfp4_gpt_oss", "nvfp4_gpt_oss", "fp8_block_llama4"])
def test_an_expert_that_a_stack_lacks_is_missing(name: str, tmp_path: Path) -> None:
    tensors, write = changed(FOLDERS[name], tmp_path)
    for stack in stacks(tensors, ""):
        tensors[stack] = tensors[stack][:-1]

    report = verify(write(tensors))

    assert rules(report) >= {"architecture-missing"}
    assert any(".experts.1" in (finding.tensor or "") for finding in report.findings)


def test_an_expert_that_is_stored_by_itself_is_missed_beside_its_scales(tmp_path: Path) -> None:
    tensors, write = changed(FOLDERS["fp8_joined_qwen3_moe"], tmp_path)
    lost = [name for name in tensors if ".experts.1.up_proj" in name]
    for name in lost:
        del tensors[name]

    found = {finding.tensor for finding in verify(write(tensors)).findings}

    assert len(lost) == 1
    assert lost[0] in found


def test_a_stack_of_more_experts_than_the_config_says_is_found(tmp_path: Path) -> None:
    tensors, write = changed(FOLDERS["mxfp4_gpt_oss"], tmp_path, num_local_experts=1)

    found = verify(write(tensors)).findings

    shapes = [finding for finding in found if finding.rule == "architecture-shape"]
    assert any(".experts." in (finding.tensor or "") for finding in shapes)


def test_a_stack_of_more_experts_that_no_format_of_its_own_has_is_not_read_and_found(tmp_path: Path) -> None:
    tensors, write = changed(FOLDERS["nvfp4_gpt_oss"], tmp_path, num_local_experts=1)

    report = verify(write(tensors))

    (note,) = (note for note in report.notes if "not read" in note)
    assert "1 to 1 experts are expected" in note
    above = "model.layers.0.mlp"
    stacks = {f"{above}.experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj_bias")}
    found = {finding.tensor for finding in report.findings}
    assert {f"{above}.router", f"{above}.router.bias"} < found
    assert found & stacks


def doubled(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8).repeat(2, 1, 1).view(tensor.dtype)


def shortened(tensor: Tensor) -> Tensor:
    return tensor[:, :, :-1]


@pytest.mark.parametrize(
    ("name", "stack", "damage"),
    [
        ("nvfp4_gpt_oss", "model.layers.0.mlp.experts.down_proj", doubled),
        ("nvfp4_gpt_oss", "model.layers.0.mlp.experts.down_proj_bias", torch.t),
        ("fp8_block_llama4", "model.layers.0.feed_forward.experts.down_proj", doubled),
        ("fp8_block_llama4", "model.layers.0.feed_forward.experts.gate_up_proj", shortened),
    ],
)
def test_a_stack_of_another_size_than_the_config_says_is_found(
    name: str, stack: str, damage: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    tensors, write = changed(FOLDERS[name], tmp_path)
    tensors[stack] = damage(tensors[stack])

    report = verify(write(tensors))

    found = [finding.tensor for finding in report.findings if finding.rule == "architecture-shape"]
    assert stack in found


@pytest.mark.parametrize("ending", ["", ".weight"])
def test_gate_and_up_that_lost_an_output_are_found_though_they_stay_one_layer(
    ending: str, tmp_path: Path
) -> None:
    tensors, write = changed(FOLDERS["fp8_block_llama4"], tmp_path)
    lead = "model.layers.0.feed_forward.experts"
    stack = f"{lead}.gate_up_proj"
    del tensors[f"{stack}_scale_inv"]
    tensors[f"{stack}{ending}"] = tensors.pop(stack)[:, :, :-1]
    tensors[f"{stack}{'.' if ending else '_'}weight_scale"] = torch.ones(len(tensors[f"{stack}{ending}"]))

    report = verify(write(tensors))

    found = [finding.tensor for finding in report.findings if finding.rule == "architecture-shape"]
    assert f"{stack}{ending}" in found


def against(folder: Path, tmp_path: Path, tensors: dict[str, Tensor], write: Any) -> Report:
    return verify(write(tensors), against=folder)


@pytest.mark.parametrize("name", FOLDERS)
def test_scales_that_are_rolled_by_one_expert_are_found_against_a_reference(
    name: str, tmp_path: Path
) -> None:
    tensors, write = changed(FOLDERS[name], tmp_path)
    rolled = [stack for stack in stacks(tensors, "down_proj") if "scale" in stack]
    for stack in rolled:
        tensors[stack] = tensors[stack].roll(1, 0)

    report = against(FOLDERS[name], tmp_path, tensors, write)

    found = {finding.tensor for finding in report.findings if finding.rule.startswith("against")}
    assert rolled
    assert len({tensor for tensor in found if tensor and ".down_proj" in tensor}) == 2
    assert not any("gate_proj" in (tensor or "") or "up_proj" in (tensor or "") for tensor in found)


@pytest.mark.parametrize("name", ["mxfp4_gpt_oss", "nvfp4_gpt_oss", "fp8_block_llama4"])
def test_gate_and_up_that_are_exchanged_are_found_against_a_reference(name: str, tmp_path: Path) -> None:
    tensors, write = changed(FOLDERS[name], tmp_path)
    for stack in stacks(tensors, "gate_up_proj"):
        if not stack.endswith("_bias"):
            axis = 2 if "gpt" not in name or ("blocks" not in stack and "scales" not in stack) else 1
            tensors[stack] = exchanged(tensors[stack], axis, turns="gpt" in name)

    report = against(FOLDERS[name], tmp_path, tensors, write)

    found = {finding.tensor or "" for finding in report.findings if finding.rule.startswith("against")}
    assert {"gate_proj", "up_proj"} <= {part for tensor in found for part in tensor.split(".")}


def exchanged(stack: Tensor, axis: int, *, turns: bool) -> Tensor:
    size = stack.shape[axis]
    order = torch.arange(size) ^ 1 if turns else torch.arange(size).roll(size // 2)
    return (
        stack.view(torch.uint8).index_select(axis, order).view(stack.dtype)
        if stack.dtype.itemsize == 1
        else stack.index_select(axis, order)
    )


def test_a_stack_and_its_experts_by_themselves_are_the_same_model(tmp_path: Path) -> None:
    """A reference may store what the checkpoint does not, and neither is missed."""
    kind = "mixtral"
    gate, up, down = (
        drawn((E, *shape), torch.bfloat16, seed) for seed, shape in enumerate(((96, 64), (96, 64), (64, 96)))
    )
    folders = tmp_path / "stacks", tmp_path / "each"
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config(kind, num_hidden_layers=1)))
    save_file(
        {
            f"{lead(kind)}.gate_up_proj": laid(kind, fused(kind, gate, up)),
            f"{lead(kind)}.down_proj": laid(kind, down),
        },
        folders[0] / "model.safetensors",
    )
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    save_file(
        {
            f"{lead(kind)}.{e}.{part}.weight": stack[e].clone()
            for part, stack in parts.items()
            for e in range(E)
        },
        folders[1] / "model.safetensors",
    )
    assert not KINDS[kind].inputs_first
    for one, other in (folders, folders[::-1]):
        compared = [each for each in verify(one, against=other).findings if each.rule.startswith("against")]
        assert compared == []


@every_folder
def test_the_report_says_that_names_are_those_of_experts(folder: Path) -> None:
    (note,) = (note for note in inspect(folder).notes if "hold something of all experts" in note)

    shown = note.rpartition(", as ")[2]
    assert ".experts.0." in shown


def test_a_wrong_shape_of_a_stack_is_that_of_each_expert(tmp_path: Path) -> None:
    tensors, write = changed(FOLDERS["mxfp4_gpt_oss"], tmp_path)
    for stack in stacks(tensors, "gate_up_proj"):
        tensors[stack] = tensors[stack][:, :-2]

    report = inspect(write(tensors))

    assert rules(report) == {"architecture-shape"}
    assert any("gate_proj.bias" in finding.message for finding in report.findings)
    assert any("experts.0.up_proj: (N, K) is (95, 64)" in finding.message for finding in report.findings)
