"""One layer from another tool, against the weights that the tool says it means."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.detect import loader_from_config
from qload.errors import CutError, DivideError
from qload.kernels import repack, restore
from qload.layouts import StoredMinusOneUnmasked
from qload.loader import FormatLoader
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage, SafetensorsStorage, WeightStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.rooms import lawful


@dataclass(frozen=True)
class Owned:
    """A layer, its config, and its owner's tensors (`expected.*`, `repacked.*`)."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    owner: Mapping[str, Tensor]

    @property
    def prefix(self) -> str:
        return next(iter(self.tensors)).rpartition(".")[0]

    @property
    def loader(self) -> FormatLoader:
        return loader_from_config(self.config)

    @property
    def expected(self) -> Tensor:
        """(N, K) in the owner's dtype."""
        return self.owner["expected.weight"].T

    def storages(self, folder: Path) -> list[WeightStorage]:
        file = folder / "model.safetensors"
        save_file(dict(self.tensors), file)
        return [MemoryStorage(self.tensors), SafetensorsStorage(file)]


def check_whole(layer: Owned, folder: Path) -> None:
    """The owner's numbers after one rounding, from memory and from a file, nothing left over."""
    for storage in layer.storages(folder):
        with Weights(storage, loader=layer.loader) as weights:
            got = weights.get_weights(layer.prefix).dequantize()
            assert torch.equal(got.to(layer.expected.dtype), layer.expected)
            assert weights.report().unused == [name for name in layer.tensors if name.endswith(".bias")]


def check_unmasked(layer: Owned, folder: Path) -> None:
    """The other reading of v1 zero points, chosen explicitly, has the numbers of the tools that take it."""
    for name in ("expected.weight_autogptq", "expected.weight_kernel_unmasked_zero"):
        if name in layer.owner:
            loader = layer.loader.with_config(zeros=StoredMinusOneUnmasked())
            got = Weights(MemoryStorage(layer.tensors), loader=loader).get_weights(layer.prefix)
            assert torch.equal(got.dequantize().half(), layer.owner[name].T)


def check_shares(layer: Owned, folder: Path, world: int) -> None:
    """Lawful cuts are the whole in pieces, all others are refused by every rank in the same words."""
    config, expected = layer.loader.rooms[0].config, layer.expected
    for storage in layer.storages(folder):
        for dim, load in (("N", Weights.get_weights_col), ("K", Weights.get_weights_row)):
            size = expected.shape[0 if dim == "N" else 1]
            if lawful(config, dim, size, world):
                parts = [load(w, layer.prefix).dequantize() for w in _ranks(storage, layer, world)]
                whole = torch.cat(parts, 0 if dim == "N" else 1)
                assert torch.equal(whole.to(expected.dtype), expected)
            else:
                assert len({_refusal(load, weights, layer) for weights in _ranks(storage, layer, world)}) == 1


def check_repack(layer: Owned, folder: Path) -> None:
    """ExLlama's order means the same, goes back, and has the bytes of the tools that write it."""
    weight = Weights(MemoryStorage(layer.tensors), loader=layer.loader).get_weights(layer.prefix)
    packed = repack(weight, "exllama")
    assert_same_bits(packed.dequantize(), weight.dequantize())
    for name, tensor in restore(packed).fields().items():
        assert_same_bits(tensor, weight.fields()[name])
    for name in ("vllm_exllama.qweight", "exllamav2.q_weight"):
        if f"repacked.{name}" in layer.owner:
            assert torch.equal(
                packed.fields()["qweight"],
                layer.owner[f"repacked.{name}"].view_as(packed.fields()["qweight"]),
            )


def _ranks(storage: WeightStorage, layer: Owned, world: int) -> list[Weights]:
    return [Weights(storage, loader=layer.loader, process_group=rank) for rank in FakeWorld(world)]


def _refusal(load: Callable[..., Any], weights: Weights, layer: Owned) -> str:
    with pytest.raises((CutError, DivideError)) as caught:
        load(weights, layer.prefix)
    return str(caught.value)
