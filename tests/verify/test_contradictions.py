"""One finding on the model, with key and values, for settings in contradiction to all layers."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qload.verify import Finding, inspect, verify
from qload.verify.report import Report, group_findings, shown_message
from tests.verify.checkpoints import GPTQ, gptq, model
from tests.verify.damage import planted
from tests.verify.damage.model import Model
from tests.verify.test_planted import sound

pytestmark = pytest.mark.usefixtures("seen_texts")

LAYERS = ("model.layers.0.up_proj", "model.layers.1.up_proj")


def changed(name: str, folder: Path, **setting: Any) -> Path:
    """Return a valid model of 14 layers, or an asymmetric one of 2, with a changed config."""
    if name == "asymmetric gptq":
        return tiny(folder, 5, 6, **setting)
    made = copy.deepcopy(sound(name))
    made.config["quantization_config"] |= setting
    return made.write(folder)


def tiny(folder: Path, *zeros: int, **config: Any) -> Path:
    """Return a symmetric GPTQ layer for each stored zero point."""
    tensors = {}
    for number, zero in enumerate(zeros):
        tensors |= gptq(f"model.layers.{number}.up_proj", zero=zero)
    return model(folder, tensors, quantization_config={**GPTQ, **config})


def only(report: Report) -> Finding:
    (finding,) = report.findings
    return finding


@pytest.mark.parametrize(
    ("name", "setting", "rule", "stated", "remedy"),
    [
        (
            "gptq", {"desc_act": False}, "act-order",
            "desc_act is false, but all 14 layers are in act order by g_idx",
            "set desc_act to true in config.json",
        ),
        (
            "gptq", {"group_size": 64}, "tensor-shape",
            "group_size is 64, but all 14 layers have groups of 32 rows by their shapes",
            "set group_size to 32 in config.json",
        ),
        (
            "awq", {"group_size": 128}, "tensor-shape",
            "group_size is 128, but all 14 layers have groups of 64 rows by their shapes",
            "set group_size to 64 in config.json",
        ),
        (
            "gptq", {"bits": 8}, "claimed-method",
            "bits is 8, but by shape all layers have 4",
            "set bits to 4 in config.json",
        ),
        (
            "asymmetric gptq", {"sym": True}, "symmetry",
            "sym is true, but all 2 layers have zero points other than 8",
            "set sym to false in config.json",
        ),
    ],
)  # fmt: skip
def test_a_setting_that_all_layers_contradict_is_one_finding_that_names_it(
    name: str, setting: dict[str, Any], rule: str, stated: str, remedy: str, tmp_path: Path
) -> None:
    finding = only(verify(changed(name, tmp_path, **setting)))

    assert (finding.rule, finding.tensor, finding.file) == (rule, None, "config.json")
    assert finding.message.startswith(f"config.json: {stated}")
    assert finding.remedy == remedy


@pytest.mark.parametrize("name", ["desc_act", "group_size", "bits"])
def test_the_remedy_mends_the_model(name: str, tmp_path: Path) -> None:
    wrong = {"desc_act": False, "group_size": 64, "bits": 8}[name]
    folder = changed("gptq", tmp_path, **{name: wrong})
    _, key, value = only(verify(folder)).remedy.removesuffix(" in config.json").replace(" to ", " ").split()

    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"][key] = json.loads(value)
    (folder / "config.json").write_text(json.dumps(config))

    assert verify(folder).findings == ()


@pytest.mark.parametrize(
    ("stored", "claimed", "right"), [(8, "gptq", "gptq_v2"), (7, "gptq_v2", "gptq"), (8, None, "gptq_v2")]
)
def test_zero_points_of_the_other_convention_name_checkpoint_format(
    stored: int, claimed: str | None, right: str, tmp_path: Path
) -> None:
    setting = {} if claimed is None else {"checkpoint_format": claimed, "format": claimed}
    folder = tiny(tmp_path, stored, stored, **setting)

    finding = only(verify(folder))

    how = "as they are" if right == "gptq_v2" else "minus one"
    by = "" if claimed else " by default"
    start = (
        f"config.json: checkpoint_format is {claimed or 'gptq'}{by}, but all 2 layers store zero points {how}"
    )
    keys = "checkpoint_format and format" if claimed else "checkpoint_format"
    assert finding.message.startswith(f"{start}, which is {right}\nfor example {LAYERS[0]}.qzeros: ")
    assert finding.remedy == f"set {keys} to {right} in config.json"
    mended = dict.fromkeys(setting or {"checkpoint_format": ""}, right)
    assert verify(tiny(tmp_path, stored, stored, **mended)).findings == ()


def test_one_layer_that_agrees_with_the_setting_leaves_a_finding_for_each_other(tmp_path: Path) -> None:
    findings = verify(tiny(tmp_path, 8, 7, 8)).findings

    assert [each.tensor for each in findings] == [f"model.layers.{n}.up_proj.qzeros" for n in (0, 2)]
    assert {each.remedy for each in findings} == {
        "write the zero points of the layer again, in the convention of the other layers"
    }
    (group,) = group_findings(findings)
    assert group.places() == ["model.layers.{0,2}.up_proj.qzeros"]


def test_one_layer_is_no_majority(tmp_path: Path) -> None:
    finding = only(verify(tiny(tmp_path, 8)))

    assert finding.tensor == f"{LAYERS[0]}.qzeros"
    assert finding.remedy.endswith(
        "; if all layers show the same, set checkpoint_format to gptq_v2 in config.json"
    )


def test_layers_of_two_other_values_are_named_by_themselves(tmp_path: Path) -> None:
    tensors = gptq(LAYERS[0])
    whole = gptq(LAYERS[1])
    whole |= {f"{LAYERS[1]}.{name}": whole[f"{LAYERS[1]}.{name}"][:1] for name in ("qzeros", "scales")}
    folder = model(tmp_path, {**tensors, **whole}, quantization_config={**GPTQ, "group_size": 4})

    findings = verify(folder).findings

    assert {each.tensor and each.tensor.rpartition(".")[0] for each in findings} == {*LAYERS}


def test_an_entry_is_named_for_the_layers_that_it_is_about(tmp_path: Path) -> None:
    rule = {r"+:.*up_proj": {"desc_act": False}}
    order = torch.tensor([1, 0] * 8, dtype=torch.int32)
    tensors = {**gptq("model.layers.0.down_proj"), **gptq("model.layers.1.down_proj")}
    for prefix in LAYERS:
        tensors |= {**gptq(prefix), f"{prefix}.g_idx": order.clone()}
    config = {**GPTQ, "desc_act": True, "dynamic": rule}

    finding = only(verify(model(tmp_path, tensors, quantization_config=config)))

    assert "all 2 layers of this entry are in act order" in finding.message
    assert finding.remedy == "set desc_act to true in dynamic.+:.*up_proj of config.json"


def test_one_file_of_several_speaks_for_its_own_layers(tmp_path: Path) -> None:
    folder = tiny(tmp_path, 8, 8)
    first = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / first)
    names = [f"{prefix}.{name}" for prefix in LAYERS for name in ("qweight", "qzeros", "scales", "g_idx")]
    files = dict.fromkeys(names, "model-00001-of-00002.safetensors") | {
        "a": "model-00002-of-00002.safetensors"
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    findings = verify(folder / first).findings

    assert [each.tensor for each in findings] == [f"{prefix}.qzeros" for prefix in LAYERS]


def test_inspect_says_it_as_verify_does(tmp_path: Path) -> None:
    folder = changed("gptq", tmp_path, group_size=64)

    assert only(inspect(folder)) == only(verify(folder))


@pytest.mark.parametrize("plant", [planted.zeros_one_higher, planted.zeros_one_lower])
def test_no_setting_is_named_where_none_explains_zero_points(plant: planted.Plant, tmp_path: Path) -> None:
    damaged: Model = copy.deepcopy(sound("awq"))
    plant(damaged)

    findings = verify(damaged.write(tmp_path)).findings

    way = "lower" if plant is planted.zeros_one_higher else "higher"
    assert {each.remedy for each in findings} == {
        f"quantize the layer again, or write its zero points 1 {way}: no setting of the config says so"
    }


def test_zero_points_two_off_are_not_called_the_other_convention(tmp_path: Path) -> None:
    """GPTQ codes one above the zero points; under gptq_v2 they would be one below."""
    damaged: Model = copy.deepcopy(sound("gptq"))
    planted.all_zeros_beside_the_middle(damaged)

    findings = verify(damaged.write(tmp_path)).findings

    assert len(findings) == 14
    assert all("checkpoint_format" not in each.remedy for each in findings)


def test_findings_of_other_remedies_or_severities_are_no_group() -> None:
    finding = Finding("hole", "error", "a.0.w", None, "a.0.w: 3 bytes", "mend it")
    others = (
        replace(finding, tensor="a.1.w", message="a.1.w: 4 bytes"),
        replace(finding, remedy="leave it"),
        replace(finding, severity="warning"),
    )

    groups = group_findings([finding, *others])

    assert [len(group.items) for group in groups] == [2, 1, 1]
    assert shown_message(groups[0]) == "for example a.0.w: 3 bytes"
    assert shown_message(groups[1]) == "3 bytes"
