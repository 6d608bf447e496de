"""Filling the slots of a model: each layer read once, on the device where it will multiply."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qload.engines.transformers.devices import SlotPlace, keep_away
from qload.engines.transformers.experts import TypedExperts
from qload.engines.transformers.placing import Places
from qload.engines.transformers.shares import SharingPlan
from qload.engines.transformers.slots import LinearSlot
from qload.engines.transformers.source import Source
from qload.errors import ShapeError
from qload.experts import ExpertFacts
from qload.kernels.declared import Activations
from qload.methods.loaded import maximum_for
from qload.parallel import ProcessGroup
from qload.spec import Weight
from qload.weights import Load, Weights
from qload.weights.loads import parts_of


@dataclass(frozen=True)
class Filling:
    """What slots are filled from, and how.

    Attributes
    ----------
    source
        The checkpoint.
    places, plan
        Which layers, and which share of each.
    group
        The ranks that share them.
    activations
        Whether inputs are quantized where the checkpoint declares it.
    facts
        What the experts of each place do between their matrices.
    """

    source: Source
    places: Places
    plan: SharingPlan
    group: ProcessGroup
    activations: Activations
    facts: Mapping[str, ExpertFacts]

    def fill(self, model: nn.Module, where: Mapping[str, SlotPlace]) -> None:
        """Load every layer to where it multiplies; the errors of its load. `where`: by a slot's name."""
        for device in dict.fromkeys(place.device for place in where.values()):
            weights = self.source.weights(device, self.group)
            here = {name for name, place in where.items() if place.device == device}
            for name, weight in self._linears(weights, here):
                slot = model.get_submodule(name)
                assert isinstance(slot, LinearSlot)
                self._fill_linear(name, slot, weight, where[name])
            for name in self.places.experts.keys() & here:
                self._fill_experts(name, model.get_submodule(name), weights, where[name])

    def _linears(self, weights: Weights, here: set[str]) -> Iterator[tuple[str, Weight]]:
        names: dict[Load, str] = {
            self.plan.load(name, prefix): name for name, prefix in self.places.linears.items() if name in here
        }
        if weights.device.type != "cpu":
            for load, weight in weights.stream(names):
                yield names[load], weight
            return
        # Reading ahead costs twice the time here, and a third of the model in memory.
        for load, name in names.items():
            yield name, weights.loader.load(weights, parts_of(weights, weights.loader, load), load.split)

    def _fill_linear(self, name: str, slot: LinearSlot, weight: Weight, place: SlotPlace) -> None:
        whole, expected = weight.layer.whole, (slot.out_features, slot.in_features)
        if whole != expected:
            raise ShapeError(weight.layer.name or name, f"{expected} = (N, K), as the model has it", whole)
        maximum = maximum_for(weight.layer, self.group)
        linear = weight.get_linear(activations=self.activations, maximum=maximum, dtype=self.source.dtype)
        slot.fill(linear, place.device)
        keep_away(linear, place)

    def _fill_experts(self, name: str, module: Any, weights: Weights, place: SlotPlace) -> None:
        typed: TypedExperts = module.typed_experts
        prefix, split = self.places.experts[name], self.plan.split(name)
        loaded = weights.get_experts(prefix, split=split, facts=self.facts[name])
        whole = (loaded.shape[0], *loaded.down.layer.whole)
        if typed.shape != whole:
            raise ShapeError(prefix, f"{typed.shape} = (E, H, I), as the model has it", whole)
        maximum = maximum_for(loaded.down.layer, self.group) if split == "tensor" else None
        linear = loaded.get_linear(activations=self.activations, maximum=maximum)
        typed.fill(linear)
        keep_away(linear, place)


def on_meta(model: nn.Module) -> Iterator[str]:
    """The names of the parameters and buffers that nothing has filled."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device == torch.device("meta"):
            yield name
