"""Experts of every format as they would be stored: drawn matrices, alike in all that a stack has once."""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from qload import ExpertFacts, ExpertsWeight, FakeWorld, FormatLoader, MemoryStorage, Weights, WeightsLoader
from qload.experts import GatedActivation
from qload.formats import FORMATS, MXFP4ExpertsWeight, QuantoWeight, UnquantizedConfig, UnquantizedWeight
from qload.loader import ConfiguredFormat
from qload.parallel import ProcessGroup
from qload.spec import Config, Weight
from qload.testing import assert_same_bits, layers
from qload.testing.strategies import DrawnLayer
from tests.format_cases import CONFIGS

PREFIX = "model.layers.0.mlp.experts"
NAMES = ("gate_proj", "up_proj", "down_proj")
FACTS = ExpertFacts(GatedActivation("silu"))
# All formats but the one that is a stack itself.
MATRICES = [weight_type for weight_type in FORMATS if weight_type is not MXFP4ExpertsWeight]
every_matrix = pytest.mark.parametrize("weight_type", MATRICES, ids=lambda weight_type: weight_type.format)


@dataclass
class StoredExperts:
    """Experts as they are stored: tensors by full name, and what they were drawn as."""

    drawn: list[tuple[DrawnLayer, DrawnLayer, DrawnLayer]]
    tensors: dict[str, Tensor]
    loader: WeightsLoader

    @property
    def count(self) -> int:
        return len(self.drawn)

    @property
    def inner(self) -> int:
        return self.drawn[0][0].N

    @property
    def config(self) -> Any:
        return self.drawn[0][0].config

    def weights(self, group: ProcessGroup | None = None, **settings: Any) -> Weights:
        """A rank's view of these tensors, in a storage of its own."""
        storage = MemoryStorage(self.tensors)
        return Weights(storage, **{"loader": self.loader, "process_group": group, **settings})

    def load(self, group: ProcessGroup | None = None, **how: Any) -> ExpertsWeight:
        """The experts as a rank loads them."""
        return self.weights(group).get_experts(PREFIX, facts=FACTS, **how)

    def meant(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """What gate, up and down of an expert mean, each loaded alone."""
        weights = self.weights()
        gate, up, down = (weights.get_weights(f"{PREFIX}.{expert}.{name}").dequantize() for name in NAMES)
        return gate, up, down


def plain(
    count: int, inner: int = 12, hidden: int = 8, make: Callable[[Tensor], Tensor] = Tensor.half, **more: Any
) -> dict[str, Tensor]:
    """The tensors of plain experts, each entry another number; `more` tensors by name."""
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    tensors, at = {}, 0
    for expert in range(count):
        for name, shape in zip(NAMES, shapes, strict=True):
            size = shape[0] * shape[1]
            tensors[f"{PREFIX}.{expert}.{name}.weight"] = make(
                (torch.arange(size) + at).reshape(shape) % 2039
            )
            at += size
    return tensors | more


PLAIN = FormatLoader(ConfiguredFormat(UnquantizedWeight, UnquantizedConfig()))


def stored_plain(count: int, inner: int = 16, hidden: int = 8, biased: bool = False) -> StoredExperts:
    """Plain experts; with biases each entry of which says where it belongs."""
    tensors = plain(count, inner, hidden)
    for expert in range(count) if biased else ():
        for at, (name, size) in enumerate(zip(("gate", "up", "down"), (inner, inner, hidden), strict=True)):
            tensors[f"{PREFIX}.{expert}.{name}_proj.bias"] = (
                torch.arange(size).float() + 100 * expert + 30 * at
            )
    return StoredExperts([], tensors, PLAIN)


@st.composite
def experts(
    draw: st.DrawFn,
    weight_type: type[Weight],
    most: int = 3,
    configs: st.SearchStrategy[Config] | None = None,
) -> StoredExperts:
    """A few experts of a format: one config, one order of groups or none, values of their own."""
    config = draw(CONFIGS[weight_type] if configs is None else configs)
    unit = lcm(*(axis.granule for spec in weight_type.tensors(config) for axis in spec.axes), 16)
    largest = 3 if weight_type is QuantoWeight else 2  # 96 inputs may be a group of more inputs
    inner, hidden = (unit * -(-48 // unit) * draw(st.sampled_from([1, largest])) for _ in range(2))
    one = st.just(config)
    drawn = []
    for _ in range(draw(st.integers(1, most), label="experts")):
        gate, up, down = (
            draw(layers(weight_type, one, N=N, K=K, fillings=("count", "noise")))
            for N, K in [(inner, hidden), (inner, hidden), (hidden, inner)]
        )
        first = drawn[0] if drawn else (gate, up, down)
        _regroup(gate, first[0])
        _regroup(up, gate, same=True)
        _regroup(down, first[2])
        drawn.append((gate, up, down))
    tensors = {
        name: tensor
        for expert, matrices in enumerate(drawn)
        for last, matrix in zip(NAMES, matrices, strict=True)
        for name, tensor in matrix.named(f"{PREFIX}.{expert}.{last}").items()
    }
    return StoredExperts(drawn, tensors, drawn[0][0].loader())


def _regroup(layer: DrawnLayer, like: DrawnLayer, same: bool = False) -> None:
    """Groups in act order where another layer has them so, in an order of its own; or the very same."""
    for spec in layer.weight_type.tensors(layer.config):
        if spec.index_of and spec.name in like.tensors and layer is not like:
            index, K = like.tensors[spec.name], layer.K
            ordered = bool((index[1:] >= index[:-1]).all())
            turned = index if same or ordered else index.roll(K // 3 + 1)
            layer.tensors[spec.name] = turned.clone()


def ranks(world: int, load: Callable[[ProcessGroup], ExpertsWeight]) -> list[ExpertsWeight]:
    """What every rank of a world loads."""
    return [load(group) for group in FakeWorld(world)]


def assert_joined(parts: list[ExpertsWeight], whole: ExpertsWeight) -> None:
    """Gate by outputs, up by outputs, down by inputs, of the experts that all parts have."""
    shift = parts[0].local.start - whole.local.start
    for expert in range(parts[0].shape[0]):
        shares = [part.dequantize(expert) for part in parts]
        gates, ups = zip(*(gate_up.chunk(2) for gate_up, _ in shares), strict=True)
        gate_up, down = whole.dequantize(expert + shift)
        assert_same_bits(torch.cat([*gates, *ups]), gate_up)
        assert_same_bits(torch.cat([down for _, down in shares], 1), down)
