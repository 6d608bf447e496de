"""One layer from another tool, against the weights that the tool says it means."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.detect import loader_from_config
from qload.errors import CutError, DivideError
from qload.formats import GPTQWeight, Marlin24Weight, MarlinWeight
from qload.kernels import repack, restore
from qload.layouts import (
    Stored,
    StoredMinusOne,
    StoredMinusOnePerField,
    StoredMinusOneUnmasked,
    ZeroPoints,
    marlin_24,
)
from qload.loader import FormatLoader
from qload.parallel import FakeWorld
from qload.spec import Weight
from qload.storage import MemoryStorage, SafetensorsStorage, WeightStorage
from qload.testing import assert_same_bits, emulators
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
    def weight(self) -> Any:
        return Weights(MemoryStorage(self.tensors), loader=self.loader).get_weights(self.prefix)

    @property
    def expected(self) -> Tensor:
        """(N, K) in the owner's dtype."""
        return self.owner["expected.weight"].T

    @property
    def unmasked(self) -> Tensor:
        """(N, K) as tools mean it that do not mask v1 zero points: the same, but for a zero point of 0."""
        others = [self.owner[name] for name in UNMASKED if name in self.owner]
        return others[0].T if others else self.expected

    def storages(self, folder: Path) -> list[WeightStorage]:
        file = folder / "model.safetensors"
        save_file(dict(self.tensors), file)
        return [MemoryStorage(self.tensors), SafetensorsStorage(file)]


UNMASKED = ("expected.weight_autogptq", "expected.weight_kernel_unmasked_zero")

# Each `repacked.*` of an owner, as qload makes it; None where qload has no tensor and the owner an empty one.
REPACKED: dict[str, Callable[[Any], Tensor | None]] = {
    "vllm_exllama.qweight": lambda weight: packed(weight, "exllama", "qweight"),
    "exllamav2.q_weight": lambda weight: packed(weight, "exllama", "qweight"),
    "perm": lambda weight: packed(weight, "exllama", "q_perm"),
    "marlin.qweight": lambda weight: packed(weight, "marlin", "qweight"),
    "marlin.scales": lambda weight: packed(weight, "marlin", "scales"),
    "marlin.qzeros": lambda weight: packed(weight, "marlin", "qzeros"),
    "marlin.g_idx_sorted": lambda weight: packed(weight, "marlin", "g_idx"),
    "marlin.perm": lambda weight: packed(weight, "marlin", "perm"),
    "gptq.qweight": lambda weight: packed(weight, "gptq_v2", "qweight"),
    "unpermuted.scales": lambda weight: weight.plain_scales(),
    "compressed.q_24_comp": lambda weight: kept(weight).to(torch.uint8),
    "exllama_gptq_v1.qweight": lambda weight: packed(weight, "gptq", "qweight"),
    "exllama_gptq_v1.qzeros_autoawq_wordborrow": lambda weight: packed(
        weight, "gptq", "qzeros", StoredMinusOne()
    ),
    "gptq_v1.qzeros_tgi_fieldwise": lambda weight: packed(weight, "gptq", "qzeros", StoredMinusOnePerField()),
}
MARLIN = ("qweight", "scales", "qzeros", "g_idx_sorted", "perm")
MARLIN_GROUPS = (32, 64, 128)


def packed(weight: Weight, layout: str, name: str, zeros: ZeroPoints | None = None) -> Tensor | None:
    return repack(weight, layout, zeros=zeros).fields().get(name)


def kept(weight: Marlin24Weight) -> Tensor:
    return marlin_24.rows(weight.config.bits).unpack(weight.B_24)


def check_whole(layer: Owned, folder: Path) -> None:
    """The owner's numbers after one rounding, from memory and from a file, nothing left over."""
    for storage in layer.storages(folder):
        with Weights(storage, loader=layer.loader) as weights:
            got = weights.get_weights(layer.prefix).dequantize()
            assert torch.equal(got.to(layer.expected.dtype), layer.expected)
            assert weights.report().unused == [name for name in layer.tensors if name.endswith(".bias")]


def check_unmasked(layer: Owned) -> None:
    """The other reading of v1 zero points, chosen explicitly, has the numbers of the tools that take it."""
    for name in UNMASKED:
        if name in layer.owner:
            loader = layer.loader.with_config(zeros=StoredMinusOneUnmasked())
            got = Weights(MemoryStorage(layer.tensors), loader=loader).get_weights(layer.prefix)
            assert torch.equal(got.dequantize().half(), layer.owner[name].T)


def check_shares(layer: Owned, folder: Path, world: int) -> None:
    """Lawful cuts are the whole in pieces, all others are refused by every rank in the same words."""
    config, expected = layer.weight.config, layer.expected
    for storage in layer.storages(folder):
        for dim, load in (("N", Weights.get_weights_col), ("K", Weights.get_weights_row)):
            size = expected.shape[0 if dim == "N" else 1]
            if lawful(config, dim, size, world, expected.shape[1]):
                parts = [load(w, layer.prefix).dequantize() for w in _ranks(storage, layer, world)]
                whole = torch.cat(parts, 0 if dim == "N" else 1)
                assert torch.equal(whole.to(expected.dtype), expected)
            else:
                assert len({_refusal(load, weights, layer) for weights in _ranks(storage, layer, world)}) == 1


def check_repacked(layer: Owned) -> None:
    """Every kernel tensor of an owner, bit for bit; a kind that is not known here fails."""
    weight = layer.weight
    theirs = {
        name.removeprefix("repacked."): t for name, t in layer.owner.items() if name.startswith("repacked.")
    }
    for name, tensor in theirs.items():
        ours = REPACKED[name](weight)
        if tensor.numel():
            assert_same_bits(torch.empty(0) if ours is None else ours, tensor)
        else:
            assert ours is None
    if "marlin.qweight" in theirs:
        absent = {f"marlin.{name}" for name in MARLIN} - set(theirs)
        assert all(REPACKED[name](weight) is None for name in absent)


def layouts(weight: Any) -> list[str]:
    """The layouts that have to hold a weight: from formats.md, not from the product."""
    codes, always = weight.codes(), ["gptq", "gptq_v2", "exllama"]
    one_group = codes.scales.shape[1] == 1
    fits = codes.bits in (4, 8) and (one_group or weight.config.group_size in MARLIN_GROUPS)
    return [*always, "marlin"] if fits else always


def check_restored(layer: Owned) -> None:
    """Every layout means the same, and goes back to the checkpoint's bits."""
    weight = layer.weight
    for layout in layouts(weight):
        other = repack(weight, layout)
        back = restore(other)
        assert_same_bits(other.dequantize(), weight.dequantize())
        assert (type(back), back.config, set(back.fields())) == (
            type(weight), weight.config, set(weight.fields()),
        )  # fmt: skip
        for name, tensor in weight.fields().items():
            assert_same_bits(back.fields()[name], tensor)


def check_emulated(layer: Owned) -> None:
    """What a kernel's lanes read, by a second reading of the layouts, is what the owner means."""
    weight = layer.weight
    for read in emulated(weight):
        assert_reads(read, layer.expected.T)
    if isinstance(weight, GPTQWeight):
        shuffled = repack(weight, "exllama")
        offset = 0 if weight.config.zeros == Stored() else 1
        read = emulators.exllama_weight(**shuffled.fields(), bits=weight.config.bits, zero_offset=offset)
        assert_reads(read, layer.unmasked.T)


def emulated(weight: Any) -> Iterator[Tensor]:
    """The weight (K, N) as each kernel reads it whose layout has to hold it, zero points plain."""
    bits, shuffled = weight.config.bits, repack(weight, "exllama", zeros=Stored())
    yield emulators.exllama_weight(**shuffled.fields(), bits=bits, zero_offset=0)
    if "marlin" in layouts(weight):
        other = repack(weight, "marlin")
        yield emulators.marlin_weight(**other.fields(), bits=bits, is_k_full=other.config.is_k_full)
    if isinstance(weight, MarlinWeight):
        yield emulators.marlin_weight(weight.B, weight.s, bits=bits)
    if isinstance(weight, Marlin24Weight):
        yield emulators.marlin_24_weight(**weight.fields(), bits=bits)


def assert_reads(read: Tensor, want: Tensor) -> None:
    """The owner's weight (K, N) after one rounding, and padding of value 0."""
    K, N = want.shape
    assert torch.equal(read[:K, :N].to(want.dtype), want)
    assert not read[K:].any()
    assert not read[:, N:].any()


def _ranks(storage: WeightStorage, layer: Owned, world: int) -> list[Weights]:
    return [Weights(storage, loader=layer.loader, process_group=rank) for rank in FakeWorld(world)]


def _refusal(load: Callable[..., Any], weights: Weights, layer: Owned) -> str:
    with pytest.raises((CutError, DivideError)) as caught:
        load(weights, layer.prefix)
    return str(caught.value)
