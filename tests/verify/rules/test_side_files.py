"""Configs that say one thing, two things, or nothing of a quantized checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from qload.checkpoint import open_checkpoint
from qload.errors import ConfigsDisagreeError
from qload.verify import inspect, verify
from qload.verify.report import finding_of
from tests.verify.checkpoints import GPTQ, gptq, model, plain, rules

pytestmark = pytest.mark.usefixtures("seen_texts")


@pytest.mark.parametrize(
    ("other", "found", "notes"),
    [
        pytest.param({**GPTQ}, set(), 0, id="the same"),
        pytest.param({"bits": 4, "group_size": 8, "desc_act": False}, set(), 0, id="less"),
        pytest.param({**GPTQ, "bits": 8}, {"config-side-file"}, 0, id="other bits"),
        pytest.param({**GPTQ, "group_size": 16}, {"config-side-file"}, 0, id="another group"),
        pytest.param(
            {"quant_method": "awq", "bits": 4, "group_size": 8}, {"config-side-file"}, 1, id="another method"
        ),
        pytest.param({**GPTQ, "checkpoint_format": "gptq_v2"}, set(), 1, id="other zero points"),
        pytest.param({**GPTQ, "sym": False}, set(), 1, id="another symmetry"),
        pytest.param({**GPTQ, "bits": "8"}, {"config"}, 0, id="malformed"),
    ],
)
def test_a_second_config_has_to_agree(
    other: dict[str, Any], found: set[str], notes: int, tmp_path: Path
) -> None:
    model(tmp_path, gptq("a"), quantization_config=GPTQ)
    (tmp_path / "quantize_config.json").write_text(json.dumps(other))

    report = verify(tmp_path)

    assert rules(report) == found
    assert sum(note.startswith("quantize_config.json: ") for note in report.notes) == notes


@pytest.mark.parametrize("name", ["quantize_config.json", "hf_quant_config.json"])
def test_loading_refuses_configs_that_disagree_as_verify_does(name: str, tmp_path: Path) -> None:
    model(tmp_path, gptq("a"), quantization_config=GPTQ)
    own = {"quantization": {"quant_algo": "FP8"}} if name.startswith("hf") else {**GPTQ, "bits": 8}
    (tmp_path / name).write_text(json.dumps(own))

    with pytest.raises(ConfigsDisagreeError) as caught:
        open_checkpoint(tmp_path)

    assert verify(tmp_path).findings[0] == inspect(tmp_path).findings[0] == finding_of(caught.value)


def test_configs_may_disagree_on_layers_that_are_not_there(tmp_path: Path) -> None:
    model(tmp_path, plain("a.weight"), quantization_config=GPTQ)
    (tmp_path / "quantize_config.json").write_text(json.dumps({**GPTQ, "bits": 8}))

    with open_checkpoint(tmp_path) as weights:
        assert weights.get_tensor("a.weight").shape == (4, 4)
    assert verify(tmp_path).notes[0] == "quantize_config.json: bits is 8, config.json says 4 and is believed"


def test_static_groups_and_zero_points_of_0_in_the_last_fields_are_notes(tmp_path: Path) -> None:
    tensors = gptq("a")
    tensors["a.qzeros"][:] = -0x08888889  # 0xf7777777
    config = {**GPTQ, "desc_act": True, "sym": False}

    report = verify(model(tmp_path, tensors, quantization_config=config))

    assert report.verdict == "ok"
    _, groups, readings = report.notes
    assert groups.startswith("config.json says desc_act is true; the groups of 1 of 1 layers are in order")
    assert readings.startswith("a.qzeros: 2 of 16 zero points are read as stored minus one")


def test_a_quantized_checkpoint_without_a_config_is_not_taken_for_plain(tmp_path: Path) -> None:
    report = verify(model(tmp_path, gptq("a")))

    assert rules(report) == {"missing-tensor"}
    assert "formats  looked for unquantized" in report.findings[0].message
