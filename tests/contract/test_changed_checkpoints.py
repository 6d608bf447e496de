"""Reports of verbs on checkpoints with one tensor or config entry changed at a time, as golden text.

Every verb names the same damage, each in its own words: a finding, a refused share, an unreadable layer.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

import qload
from qload.errors import QloadError
from qload.testing.tiny_checkpoint import make_checkpoint
from tests.support.changed_values import changed_tensors, changed_values, shown

QUANTIZED = ("gptq-act-order", "awq", "fp8-block")  # with an index, with zero points, and with blocks
LAYER = "model.layers.0.self_attn.k_proj."  # with fewer outputs than inputs
WORLDS = (2, 3, 8)


def changes(
    tensors: dict[str, Tensor], config: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Tensor], Any]]:
    """Yield words, the tensors and the config."""
    quantized = config["quantization_config"]
    with_bias = quantized["quant_method"] == "awq"  # once, as a bias is the same in every format
    for name in sorted(each for each in tensors if each.startswith(LAYER)):
        if name.endswith(".bias") and not with_bias:
            continue
        yield f"no {name}", {each: tensor for each, tensor in tensors.items() if each != name}, config
        for words, tensor in changed_tensors(tensors[name]):
            yield f"{name}: {words}", {**tensors, name: tensor}, config
    for words, section in changed_values(quantized):
        yield words, tensors, {**config, "quantization_config": section}


def reports(folder: Path, whole: Path) -> Iterator[str]:
    """Yield a line for each thing that a verb reports."""
    calls = {"verify": lambda: qload.verify(folder), "diff": lambda: qload.diff(whole, folder)}
    if folder == whole:
        calls |= {"plan": lambda: qload.plan(folder, tp=WORLDS), "explain": lambda: qload.explain(folder)}
    for verb, call in calls.items():
        try:
            lines = list(report_lines(call()))
        except QloadError as error:
            lines = [f"{type(error).__name__}: {error}"]
        for line in lines:
            text = line.replace(str(folder), "CHANGED").replace(str(whole), "WHOLE").replace("\n", " | ")
            yield f"  {verb}: {text}"


def report_lines(report: Any) -> Iterator[str]:
    """Yield the findings of a report and its changed layers."""
    for finding in getattr(report, "findings", ()):
        yield shown(finding)
    for name in ("unreadable", "unsupported"):
        if text := getattr(report, name, ""):
            yield f"{name}: {text}"
    for world, plan in getattr(report, "worlds", {}).items():
        yield f"{world} ranks: {shown(plan)}"
    for layer in report.layers:
        if getattr(layer, "outcome", "bits") != "bits" or (
            isinstance(error := getattr(layer, "error", None), str) and error
        ):
            yield shown(layer)
        if getattr(layer, "prefix", "") + "." == LAYER and hasattr(layer, "shares"):
            yield from (f"{world} ranks: {shown(share)}" for world, share in layer.shares.items())


@pytest.mark.parametrize("dialect", QUANTIZED)
def test_what_verbs_report_of_a_changed(dialect: str, golden: SnapshotAssertion, tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "changed"
    tensors = make_checkpoint(dialect, whole, config={"num_hidden_layers": 1})
    config = json.loads((whole / "config.json").read_text())
    folder.mkdir()
    lines = [*reports(whole, whole)]
    for words, changed, entries in changes(tensors, config):
        save_file(changed, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(entries))
        lines += [words, *reports(folder, whole)]

    assert "\n".join(lines) == golden
