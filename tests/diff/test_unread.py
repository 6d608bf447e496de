"""Tensors that no format reads are never equal, and what stands for them elsewhere is not missing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qload import diff
from qload.testing import make_checkpoint
from tests.support.unread import EXPERTS, KINDS, LAYER, known_type, layer
from tests.verify.checkpoints import GPTQ, gptq, model

pytestmark = pytest.mark.usefixtures("seen_texts")

KIND = pytest.mark.parametrize("kind", KINDS)


@KIND
def test_equal_bytes_are_not_called_equal(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind](tmp_path / "checkpoint")

    found = diff(given.folder, given.folder)

    outcomes = {layer.name: layer.outcome for layer in found.layers}
    assert {name for name, outcome in outcomes.items() if outcome == "unread"} == given.unread.keys()
    assert all(outcome == "bits" for name, outcome in outcomes.items() if name not in given.unread)
    assert all(given.reason in layer.detail for layer in found.layers if layer.outcome == "unread")
    assert (found.verdict, found.exit_code) == ("incomplete", 4)


@KIND
def test_what_differs_elsewhere_is_a_finding(kind: str, tmp_path: Path) -> None:
    one, other = (KINDS[kind](tmp_path / name) for name in ("one", "other"))
    file = other.folder / "model.safetensors"
    norm = load_file(file)["model.norm.weight"]
    save_file({**load_file(file), "model.norm.weight": norm + 1}, file)

    found = diff(one.folder, other.folder)

    assert found.verdict == "findings"
    assert [layer.name for layer in found.layers if layer.outcome == "differs"] == ["model.norm"]
    assert found.counts["unread"] == len(one.unread)


@pytest.mark.parametrize("turned", [False, True])
def test_experts_beside_a_stack_that_is_not_read_are_unread_and_not_missing(
    turned: bool, tmp_path: Path
) -> None:
    given, sound = known_type(tmp_path / "unread"), tmp_path / "sound"
    make_checkpoint("fp8-block", sound, model="qwen3_moe")
    folders = (sound, given.folder) if turned else (given.folder, sound)

    found = diff(*folders)

    outcomes = {layer.name: layer.outcome for layer in found.layers}
    assert set(outcomes.values()) == {"bits", "unread"}
    experts = {name for name, outcome in outcomes.items() if outcome == "unread"} - given.unread.keys()
    assert experts
    assert all(name.startswith(f"{EXPERTS}.") for name in experts)
    assert given.unread.keys() <= outcomes.keys()
    assert found.verdict == "incomplete"
    details = {layer.name: layer.detail for layer in found.layers}
    assert {details[name] for name in experts} == {f"in {given.folder} it is not read"}
    others = {layer.name: layer.other for layer in found.layers}
    assert {others[name] == name for name in experts} == {not turned}
    assert {details[name].startswith(f"{given.folder}: ") for name in given.unread} == {turned}
    assert {others[name] for name in given.unread} == (given.unread.keys() if turned else {None})


@pytest.mark.parametrize("turned", [False, True])
def test_a_layer_beside_one_that_is_not_read_names_the_folder_where_it_is_not(
    turned: bool, tmp_path: Path
) -> None:
    """A layer of an unread dialect, and a readable one of the same name."""
    given, sound = layer(tmp_path / "unread"), tmp_path / "sound"
    sound.mkdir()
    model(sound, {f"{LAYER}.weight": torch.ones(16, 128), "model.norm.weight": torch.ones(128)})
    folders = (sound, given.folder) if turned else (given.folder, sound)

    found = {each.name: each for each in diff(*folders).layers}

    assert (found[LAYER].outcome, found[LAYER].detail) == ("unread", f"in {given.folder} it is not read")
    assert found[LAYER].other == (None if turned else LAYER)
    assert {name for name, each in found.items() if each.outcome == "unread"} == {LAYER, *given.unread}


@pytest.mark.parametrize("turned", [False, True])
def test_a_damaged_layer_is_refused_and_not_unread(turned: bool, tmp_path: Path) -> None:
    (tmp_path / "sound").mkdir()
    (tmp_path / "broken").mkdir()
    sound = model(tmp_path / "sound", gptq("a"), quantization_config=GPTQ)
    tensors = gptq("a")
    tensors["a.scales"] = torch.ones(3, 8, dtype=torch.float16)
    broken = model(tmp_path / "broken", tensors, quantization_config=GPTQ)

    found = diff(*((broken, sound) if turned else (sound, broken)))

    assert [(layer.name, layer.outcome) for layer in found.layers] == [("a", "refused")]
    assert "a.scales: wrong shape" in found.layers[0].detail
    assert found.verdict == "findings"


@pytest.mark.parametrize("turned", [False, True])
def test_a_foreign_dialect_is_unsupported_with_its_way_out(turned: bool, tmp_path: Path) -> None:
    foreign, sound = tmp_path / "foreign", tmp_path / "sound"
    foreign.mkdir()
    (foreign / "model.onnx").write_bytes(bytes(60))
    make_checkpoint("plain", sound)

    found = diff(*((sound, foreign) if turned else (foreign, sound)))

    assert (found.verdict, found.exit_code, found.unreadable) == ("unsupported", 4, "")
    assert "ONNX Runtime runs it" in found.unsupported
