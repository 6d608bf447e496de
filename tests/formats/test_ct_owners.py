"""compressed-tensors, ModelOpt and gpt-oss: what these tools say that their layers mean, whole and shared."""

import json
from math import gcd
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qload.errors import CutError, DivideError
from qload.parallel import FakeWorld
from qload.weights import Weights, open_checkpoint
from tests.paths import cases

LAYERS = cases("compressed_tensors", "modelopt", "mxfp4")
LOADS = {"N": Weights.get_weights_col, "K": Weights.get_weights_row}


def prefix(folder: Path) -> str:
    """The layer's name: up to the last dot, or up to `_blocks`."""
    first = min(load_file(folder / "model.safetensors"))
    return first.removesuffix("_bias") if first.endswith("_bias") else first.rpartition(".")[0]


def expected(folder: Path) -> Tensor:
    """(N, K), or (E, N, K), in the owner's dtype."""
    tensor = load_file(folder / "expected" / "expected.safetensors")["expected.weight"]
    return tensor.mT if tensor.ndim == 3 else tensor


def granules(folder: Path) -> tuple[int, int]:
    """Where N and K may be cut, from formats.md and not from the product; 1: anywhere."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    group: dict[str, Any] = next(iter(config.get("config_groups", {}).values()), {})
    weights, name = group.get("weights", {}), folder.name
    if name.startswith("marlin_24"):
        size = 0 if "channel" in name or "edge" in name else weights["group_size"]
        return 64, 128 if "edge" in name else max(32, size)
    if name.startswith("pack"):
        bits, act_order = weights["num_bits"], "act_order" in name
        word = 32 // bits if "by_words" in name else 32 // gcd(bits, 32)
        size = 1 if act_order else weights["group_size"] or 1
        return 1 if weights["symmetric"] else word, word * size // gcd(word, size)
    if "block128" in name:
        return 128, 128
    return 1, 16 if "nvfp4" in name else 32 if "mxfp4" in name or "experts" in name else 1


@pytest.mark.parametrize("folder", LAYERS, ids=lambda folder: folder.name)
def test_a_whole_layer_has_its_owners_numbers_and_only_a_bias_is_left_over(folder: Path) -> None:
    with open_checkpoint(folder) as weights:
        got, want = weights.get_weights(prefix(folder)).dequantize(), expected(folder)

        assert torch.equal(got.to(want.dtype), want)
        assert all(name.endswith("_bias") for name in weights.report().unused)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("dim", ["N", "K"])
@pytest.mark.parametrize("folder", LAYERS, ids=lambda folder: folder.name)
def test_shares_have_their_owners_numbers_or_are_refused_alike(folder: Path, dim: str, world: int) -> None:
    want, axis = expected(folder), "NK".index(dim) - 2
    share, rest = divmod(want.shape[axis], world)
    parts, refused = [], set()
    for rank in FakeWorld(world):
        with open_checkpoint(folder, process_group=rank) as weights:
            try:
                parts.append(LOADS[dim](weights, prefix(folder)).dequantize())
            except (CutError, DivideError) as error:
                refused.add(str(error))

    if rest or share % granules(folder)[dim == "K"]:
        assert (len(parts), len(refused)) == (0, 1)
    else:
        assert torch.equal(torch.cat(parts, axis).to(want.dtype), want)
