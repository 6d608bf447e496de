"""The least that the module over experts asks for: stacks of typed weights, and what is known beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from qload.experts.gated import GatedActivation
from qload.kernels.experts import Experts
from qload.spec import Layer, Weight


@dataclass(frozen=True)
class ExpertFacts:
    activation: GatedActivation
    side: Literal["output", "input"] = "output"


@dataclass(frozen=True)
class LocalExperts:
    start: int
    stop: int
    total: int

    @property
    def map(self) -> Tensor:
        here = [
            number - self.start if self.start <= number < self.stop else -1 for number in range(self.total)
        ]
        return torch.tensor(here)


@dataclass(frozen=True, eq=False)
class Stack:
    weight_type: type[Weight]
    config: Any
    layer: Layer
    tensors: Mapping[str, Tensor]

    @property
    def format(self) -> str:
        return self.weight_type.format

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(next(iter(self.tensors.values()))), self.layer.N, self.layer.K

    def fields(self) -> dict[str, Tensor]:
        return dict(self.tensors)

    def expert(self, index: int) -> Weight:
        held = {field: tensor[index] for field, tensor in self.tensors.items()}
        return self.weight_type.unchecked(self.config, self.layer, held)

    def holding(self, tensors: Mapping[str, Tensor]) -> "Stack":
        return replace(self, tensors=tensors)


def stacked(name: str, count: int, weights: Sequence[Weight]) -> Stack:
    """`count` typed weights of one format, config and shape as a stack; half of its outputs is a gate's."""
    first = weights[0]
    tensors = {field: torch.stack([each.fields()[field] for each in weights]) for field in first.fields()}
    assert len(weights) == count
    return Stack(type(first), first.config, replace(first.layer, name=name), tensors)


@dataclass(frozen=True, eq=False)
class ExpertsWeight:
    gate_up: Stack
    down: Stack
    facts: ExpertFacts
    local: LocalExperts
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.down.shape

    @property
    def device(self) -> torch.device:
        return self.down.device

    def get_linear(self) -> Experts:
        return Experts(self)
