"""bitsandbytes: what it says that its own layers mean, whole and in shares."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qload.errors import CutError, DivideError
from qload.parallel import FakeWorld
from qload.testing import assert_same_bits
from qload.weights import Weights, open_checkpoint
from tests.paths import cases
from tests.rooms import lawful

LAYERS = cases("bnb")
PREFIX = "model.layers.0.self_attn.v_proj"

every_layer = pytest.mark.parametrize("folder", LAYERS, ids=lambda folder: folder.name)


def owner(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "expected" / "expected.safetensors")


@every_layer
def test_a_whole_layer_has_its_owners_numbers_and_nothing_is_left_over(folder: Path) -> None:
    want = owner(folder)["expected.weight"]
    with open_checkpoint(folder) as weights:
        got = weights.get_weights(PREFIX).dequantize()

        assert torch.equal(got.to(want.dtype), want)
        assert weights.report().complete


@every_layer
def test_the_scales_are_its_owners_bit_for_bit(folder: Path) -> None:
    with open_checkpoint(folder) as weights:
        weight: Any = weights.get_weights(PREFIX)

    if "extra.absmax_f32" in owner(folder):
        assert_same_bits(weight.absmax, owner(folder)["extra.absmax_f32"])
    else:
        assert weight.format == "bnb_int8"


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(("dim", "load"), [("N", Weights.get_weights_col), ("K", Weights.get_weights_row)])
@every_layer
def test_shares_have_their_owners_numbers_or_are_refused(
    folder: Path, dim: str, load: Any, world: int
) -> None:
    want, axis, parts = owner(folder)["expected.weight"], int(dim == "K"), []
    with open_checkpoint(folder) as weights:
        config = weights.get_weights(PREFIX).config
    for rank in FakeWorld(world):
        with open_checkpoint(folder, process_group=rank) as weights:
            if lawful(config, dim, want.shape[axis], world, want.shape[1]):
                parts.append(load(weights, PREFIX).dequantize())
            else:
                with pytest.raises((CutError, DivideError)):
                    load(weights, PREFIX)

    assert not parts or torch.equal(torch.cat(parts, axis).to(want.dtype), want)


def test_the_layers_hold_every_kind_that_is_told_apart() -> None:
    found = set()
    for folder in LAYERS:
        with open_checkpoint(folder) as weights:
            weight: Any = weights.get_weights(PREFIX)
            found.add((weight.format, weights.info(f"{PREFIX}.weight").dtype))

    assert found == {
        ("bnb_nf4", torch.uint8),
        ("bnb_nf4", torch.bfloat16),
        ("bnb_fp4", torch.uint8),
        ("bnb_int8", torch.int8),
    }
