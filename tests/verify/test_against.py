"""Comparison of a checkpoint with a reference of the same format or in plain weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qload.checkpoint import open_checkpoint
from qload.verify import against, verify
from tests.paths import FIXTURES
from tests.verify.checkpoints import GPTQ, comfy_convrot, gptq, model, rules

pytestmark = pytest.mark.usefixtures("seen_texts")


def test_a_plain_reference_of_the_dequantized_weights_agrees(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "reference").mkdir()
    mine = model(tmp_path / "mine", gptq("a", zero=3), quantization_config={**GPTQ, "sym": False})
    with open_checkpoint(mine) as weights:
        dense = weights.get_weights("a").dequantize()
    reference = model(tmp_path / "reference", {"a.weight": dense.half()})

    assert verify(mine, against=reference).findings == ()


@pytest.mark.parametrize(
    ("noise", "found", "said"),
    [
        pytest.param(0.3, set(), "relative error", id="the float original"),
        pytest.param(30.0, {"against-value"}, "differs", id="another model"),
    ],
)
def test_a_float_original_may_differ_by_the_quantization_error(
    noise: float, found: set[str], said: str, tmp_path: Path
) -> None:
    for name in ("mine", "reference"):
        (tmp_path / name).mkdir()
    tensors = gptq("a")
    tensors["a.qweight"] = torch.randint(-(2**31), 2**31, (2, 8), dtype=torch.int32)
    mine = model(tmp_path / "mine", tensors, quantization_config=GPTQ)
    with open_checkpoint(mine) as weights:
        dense = weights.get_weights("a").dequantize()
    original = dense + noise * torch.randn(dense.shape, generator=torch.Generator().manual_seed(0))
    if noise > 1:
        original = -dense
    reference = model(tmp_path / "reference", {"a.weight": original})

    report = verify(mine, against=reference)

    assert rules(report) == found
    assert said in " ".join([*report.notes, *(finding.message for finding in report.findings)])


def test_zeros_that_agree_do_not_make_an_original_a_checkpoint(tmp_path: Path) -> None:
    """Most weights of the original are zero, and every quantizer keeps zeros."""
    for name in ("mine", "reference"):
        (tmp_path / name).mkdir()
    tensors = gptq("a")
    words = torch.tensor([0x8A888688, 0x88858888, 0x8988888D, 0x88838888]).repeat(4).reshape(2, 8)
    tensors["a.qweight"] = (words - 2**32).to(torch.int32)  # most codes are 8, the code of zero
    mine = model(tmp_path / "mine", tensors, quantization_config=GPTQ)
    with open_checkpoint(mine) as weights:
        dense = weights.get_weights("a").dequantize()
    reference = model(tmp_path / "reference", {"a.weight": dense + 0.25 * (dense != 0)})

    assert verify(mine, against=reference).findings == ()


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        pytest.param({"zero": 8}, "zero points one lower", id="zeros one too high"),
        pytest.param({"zero": 6}, "zero points one higher", id="zeros one too low"),
    ],
)
def test_a_known_mistake_is_named(mistake: dict[str, Any], named: str, tmp_path: Path) -> None:
    for name in ("mine", "reference"):
        (tmp_path / name).mkdir()
    config = {**GPTQ, "sym": False}
    mine = model(tmp_path / "mine", gptq("a", **mistake), quantization_config=config)
    reference = model(tmp_path / "reference", gptq("a"), quantization_config=config)

    (finding,) = verify(mine, against=reference).findings

    assert finding.message.endswith(f"read with {named}, it agrees")
    assert "first at (n, k) = (0, 0)" in finding.message


def test_a_reference_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    folder = model(tmp_path, gptq("a"), quantization_config=GPTQ)

    assert rules(verify(folder, against=tmp_path / "nowhere")) == {"no-files"}


def test_equal_bytes_with_other_transforms_differ(tmp_path: Path) -> None:
    mine, reference = tmp_path / "mine", tmp_path / "reference"
    for folder, size in ((mine, 4), (reference, 16)):
        folder.mkdir()
        model(folder, comfy_convrot("a", size))

    assert rules(verify(mine, against=reference)) == {"against-value"}


def test_a_tensor_outside_of_layers_is_compared_by_shape_and_values(tmp_path: Path) -> None:
    found = {}
    for name, bias in (
        ("mine", torch.ones(4)),
        ("longer", torch.ones(5)),
        ("other", torch.tensor([1.0, 1, 2, 3])),
    ):
        (tmp_path / name).mkdir()
        folder = model(tmp_path / name, {"a.weight": torch.ones(4, 4), "a.bias": bias})
        report = verify(tmp_path / "mine", against=folder)
        found[name] = [(each.rule, each.tensor, each.message) for each in report.findings]

    assert found["mine"] == []
    assert found["longer"] == [("against-shape", "a.bias", "a.bias: shape is (4,), the reference has (5,)")]
    assert found["other"] == [
        (
            "against-value",
            "a.bias",
            "a.bias: differs from the reference first at (2,): 1, the reference has 2; 2 of 4 differ",
        )
    ]


def test_a_bug_of_the_comparison_is_a_finding_at_its_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyError("G")

    for name in ("mine", "reference"):
        (tmp_path / name).mkdir()
        model(tmp_path / name, gptq("a", zero=len(name)), quantization_config={**GPTQ, "sym": False})
    monkeypatch.setattr(against, "Comparison", fail)

    (finding,) = verify(tmp_path / "mine", against=tmp_path / "reference").findings

    assert (finding.rule, finding.tensor) == ("internal", "a")
    assert finding.message == "a: against: internal error, KeyError: 'G'"


def test_a_divisor_of_zero_makes_no_weight_that_equals_itself(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "compressed_tensors" / "nvfp4", tmp_path / "model"))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    assert verify(folder, against=folder).findings == ()

    for name in tensors:
        if name.endswith("weight_global_scale"):
            tensors[name].zero_()
    save_file(tensors, file)

    assert rules(verify(folder, against=folder)) == {"scale-value", "against-value"}


@pytest.mark.parametrize(("value", "found"), [(1.0, {"against-missing"}), (0.0, set())])
def test_a_bias_of_one_side_alone_differs_unless_it_is_zero(
    value: float, found: set[str], tmp_path: Path
) -> None:
    folders = []
    for name, extra in (("ours", {}), ("theirs", {"a.bias": torch.full((8,), value, dtype=torch.float16)})):
        (tmp_path / name).mkdir()
        tensors = {**gptq("a"), **extra}
        folders.append(model(tmp_path / name, tensors, quantization_config=GPTQ))
    ours, theirs = folders

    assert rules(verify(ours, against=theirs)) == rules(verify(theirs, against=ours)) == found
