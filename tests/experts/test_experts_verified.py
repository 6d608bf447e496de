"""`verify` sees experts that are stored each by itself: one is missing, has scales of another, gate is up."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.verify import verify
from tests.paths import cases
from tests.verify.checkpoints import model

FOLDERS = {folder.name.removeprefix("model_"): folder for folder in cases("experts")}
every_folder = pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS.keys())
LAST = ".experts.1."


def apart(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, each expert's by itself, whatever stack they are stored in."""
    with open_checkpoint(folder) as weights:
        return {name: weights.storage.read(name).contiguous() for name in weights.storage.keys()}  # noqa: SIM118


def write(folder: Path, copy: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())))
    return copy


def renamed(tensors: dict[str, Tensor], own: str, other: str) -> dict[str, Tensor]:
    """The same with two parts of their names exchanged."""
    turned = {own: other, other: own}
    parts = ((name, next((part for part in turned if part in name), None)) for name in tensors)
    return {name.replace(part, turned[part]) if part else name: tensors[name] for name, part in parts}


@every_folder
def test_experts_by_themselves_are_sound_and_as_their_stacks(folder: Path, tmp_path: Path) -> None:
    copy = write(folder, tmp_path, apart(folder))

    assert verify(copy, against=folder).findings == ()
    assert verify(folder, against=copy).findings == ()


@every_folder
def test_a_missing_expert_is_found_alone(folder: Path, tmp_path: Path) -> None:
    tensors = apart(folder)
    kept = {name: tensor for name, tensor in tensors.items() if LAST not in name}

    (finding,) = verify(write(folder, tmp_path, kept)).findings

    (lost,) = {name.partition(LAST)[0] + LAST.rstrip(".") for name in tensors if LAST in name}
    assert (finding.rule, finding.tensor) == ("architecture-missing", lost)


@every_folder
@pytest.mark.parametrize("part", ["gate_proj", "down_proj"])
def test_a_missing_matrix_of_an_expert_is_found_alone(folder: Path, part: str, tmp_path: Path) -> None:
    tensors = apart(folder)
    kept = {name: tensor for name, tensor in tensors.items() if f"{LAST}{part}" not in name}

    report = verify(write(folder, tmp_path, kept))

    assert report.findings
    assert all(f"{LAST}{part}" in finding.message for finding in report.findings)


def test_what_a_model_of_a_type_that_is_not_known_lacks_is_a_note(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight": torch.randn(16, 16, generator=chance)
        for layer in range(3)
        for expert in range(4)
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    kept = {name: tensor for name, tensor in tensors.items() if ".1.mlp.experts.2." not in name}

    report = verify(model(tmp_path, kept, model_type="no_such_type"))

    assert report.findings == ()
    assert any("model.layers.1.mlp.experts.2" in note for note in report.notes), report.notes


@every_folder
def test_scales_of_the_next_expert_are_found_against_a_reference(folder: Path, tmp_path: Path) -> None:
    tensors = apart(folder)
    rolled = {name: t for name, t in tensors.items() if ".down_proj.weight_scale" in name and t.ndim}

    copy = write(folder, tmp_path, tensors | renamed(rolled, ".experts.0.", ".experts.1."))

    found = {f.tensor or "" for f in verify(copy, against=folder).findings if f.rule == "against-value"}
    layers = {name.rpartition(".")[0] for name in rolled if ".experts." in name}
    assert layers
    assert found == layers


@every_folder
def test_gate_and_up_that_are_exchanged_are_found_against_a_reference(folder: Path, tmp_path: Path) -> None:
    tensors = apart(folder)
    own = {name: tensor for name, tensor in tensors.items() if ".experts." in name}

    copy = write(folder, tmp_path, tensors | renamed(own, "gate_proj", "up_proj"))

    found = {f.tensor or "" for f in verify(copy, against=folder).findings if f.rule.startswith("against")}
    layers = {f".{part}" for name in found for part in name.split(".") if part.endswith("_proj")}
    assert layers == {".gate_proj", ".up_proj"}
    experts = {name.partition(".experts.")[2].partition(".")[0] for name in found}
    assert experts == {name.partition(".experts.")[2].partition(".")[0] for name in own}
