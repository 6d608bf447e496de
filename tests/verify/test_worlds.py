"""Worlds of ranks that can share a checkpoint, and those that cannot."""

from pathlib import Path

import pytest

from qload.errors import ArgumentError
from qload.verify import verify
from tests.verify.checkpoints import GPTQ, gptq, model


def test_a_world_that_cannot_share_a_layer_is_told_with_the_lawful_ones(tmp_path: Path) -> None:
    tensors = {**gptq("model.q_proj"), **gptq("model.o_proj"), **gptq("model.other")}
    folder = model(tmp_path, tensors, quantization_config=GPTQ)

    report = verify(folder, tp=4)

    assert verify(folder, tp=1).findings == ()
    assert [(finding.rule, finding.tensor) for finding in report.findings] == [
        ("tensor-parallel", "model.o_proj.qweight"),
        ("tensor-parallel", "model.q_proj.qzeros"),
    ]
    assert "for 4 ranks, 1 other layers can be cut neither way: model.other" in report.notes


def test_of_layers_that_no_world_can_share_the_first_four_are_named(tmp_path: Path) -> None:
    others = [f"model.other{number}" for number in range(5)]
    tensors = {name: held for other in others for name, held in gptq(other).items()}

    report = verify(model(tmp_path, tensors, quantization_config=GPTQ), tp=4)

    assert f"for 4 ranks, 5 other layers can be cut neither way: {', '.join(others[:4])}" in report.notes


def test_a_world_of_none_is_a_callers_mistake(tmp_path: Path) -> None:
    for none in (0, (), (2, 0)):
        with pytest.raises(ArgumentError, match="tp\n  expected at least 1"):
            verify(tmp_path, tp=none)
