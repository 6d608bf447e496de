"""A layer without its codes: their shape is there, all else is read, and no more than that."""

from pathlib import Path

import pytest
import torch

from qload.checkpoint import open_checkpoint
from qload.loader import LayerDescription
from qload.loader.source import source_without_codes
from qload.spec import Role
from qload.testing import make_checkpoint

UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("format", "codes"),
    [
        ("gptq", "qweight"),
        ("awq", "qweight"),
        ("gptq-act-order", "qweight"),
        ("compressed-tensors", "weight_packed"),
        ("fp8-block", "weight"),
    ],
)
def test_the_codes_alone_are_left_out(format: str, codes: str, tmp_path: Path) -> None:
    make_checkpoint(format, tmp_path / "made")
    with open_checkpoint(tmp_path / "made") as weights:
        layer = weights.loader.describe(weights, UP)
        assert isinstance(layer, LayerDescription)
        source = source_without_codes(weights, layer)
        names = [layer.names.full(spec.name) for spec in layer.specs]
        read = {name: source.read(name, role=Role.INDEX) for name in names}
        stored = {name: weights.read(name, role=Role.INDEX) for name in names}

    assert {name: tensor.shape for name, tensor in read.items()} == {
        name: tensor.shape for name, tensor in stored.items()
    }
    assert not read[f"{UP}.{codes}"].float().any()
    assert stored[f"{UP}.{codes}"].float().any()
    assert all(torch.equal(read[name], stored[name]) for name in names if name != f"{UP}.{codes}")
