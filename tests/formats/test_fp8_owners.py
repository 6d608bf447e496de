"""FP8: what the tools that write it say that their layers mean, whole and in shares."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qload.errors import CutError, DivideError
from qload.formats.fp8 import to_fnuz
from qload.parallel import FakeWorld
from qload.testing import assert_same_bits
from qload.weights import Weights, open_checkpoint
from tests.paths import cases

LAYERS = cases("fp8")
PREFIX = "model.layers.0.mlp.up_proj"


def expected(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "expected" / "expected.safetensors")


def lawful(folder: Path, dim: int, size: int, world: int) -> bool:
    """From formats.md, not from the product."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    block = (config.get("weight_block_size") or (1, 1))[dim]
    return size % world == 0 and size // world % block == 0


@pytest.mark.parametrize("folder", LAYERS, ids=lambda folder: folder.name)
def test_a_whole_layer_has_its_owners_numbers_and_nothing_is_left_over(folder: Path) -> None:
    with open_checkpoint(folder) as weights:
        got = weights.get_weights(PREFIX).dequantize()

        assert torch.equal(got, expected(folder)["expected.weight"])
        assert weights.report().complete


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(("dim", "load"), [(0, Weights.get_weights_col), (1, Weights.get_weights_row)])
@pytest.mark.parametrize("folder", LAYERS, ids=lambda folder: folder.name)
def test_shares_have_their_owners_numbers_or_are_refused(
    folder: Path, dim: int, load: object, world: int
) -> None:
    assert callable(load)
    want = expected(folder)["expected.weight"]
    parts = []
    for rank in FakeWorld(world):
        with open_checkpoint(folder, process_group=rank) as weights:
            if lawful(folder, dim, want.shape[dim], world):
                parts.append(load(weights, PREFIX).dequantize())
            else:
                with pytest.raises((CutError, DivideError)):
                    load(weights, PREFIX)

    assert not parts or torch.equal(torch.cat(parts, dim), want)


def test_the_bytes_of_fnuz_are_its_owners(fixtures: Path) -> None:
    folder = fixtures / "fp8" / "tensor_fnuz_2x128"
    with open_checkpoint(folder) as weights:
        made = to_fnuz(weights.get_weights(PREFIX))  # type: ignore[arg-type]

    theirs = {name.removeprefix("repacked.fnuz."): tensor for name, tensor in expected(folder).items()}
    assert_same_bits(made.weight.view(torch.uint8), theirs["weight_bytes"])
    assert_same_bits(made.weight_scale, theirs["weight_scale"])
    assert made.input_scale is not None
    assert_same_bits(made.input_scale, theirs["input_scale"])
