"""Hypothesis strategies for layers, inferred from a format's own declaration of its tensors.

A format gives only its configs; sizes follow from its axes, dtypes and fillings from its specs, group
indices from the axis they point into. Nothing here knows a format by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor

try:
    from hypothesis import strategies as st
except ModuleNotFoundError:
    raise ImportError(
        "strategies need Hypothesis, which the extra `testing` brings: pip install 'qload-weights[testing]'"
    ) from None

from qload.loader import ConfiguredFormat, FormatLoader
from qload.spec import LOGICAL, Axis, Config, Role, TensorSpec, Weight, named
from qload.storage import MemoryStorage
from qload.testing.samples import FACTS
from qload.weights import Weights

PREFIX = "layer"
FILLINGS = ("zeros", "count", "noise")  # the simplest first; all but noise are exact in every dtype


@dataclass(frozen=True, repr=False)
class DrawnLayer:
    """A drawn layer as it would be stored.

    Attributes
    ----------
    weight_type, config
        Its format: the type of its typed weight, and the config.
    tensors
        By field.
    sizes
        Logical ones, by letter: N, K and those of free axes.
    drawn
        What was drawn, in words, for messages.
    """

    weight_type: type[Weight]
    config: Config
    tensors: dict[str, Tensor]
    sizes: dict[str, int]
    drawn: str

    @property
    def N(self) -> int:
        """Its outputs."""
        return self.sizes["N"]

    @property
    def K(self) -> int:
        """Its inputs; 1 of a vector."""
        return self.sizes.get("K", 1)

    def named(self, prefix: str = PREFIX) -> dict[str, Tensor]:
        """The tensors under their on-disk names, for a layer called `prefix`."""
        suffixes = {spec.name: spec.suffix for spec in self.weight_type.tensors(self.config)}
        return {named(prefix, suffixes[name]): tensor for name, tensor in self.tensors.items()}

    def storage(self, prefix: str = PREFIX) -> MemoryStorage:
        """A storage that holds this layer alone, called `prefix`."""
        return MemoryStorage(self.named(prefix))

    def loader(self) -> FormatLoader:
        """The loader that reads it."""
        return FormatLoader(ConfiguredFormat(self.weight_type, self.config))

    def weight(self) -> Weight:
        """The typed weight; of a format that has something to resolve, as it is loaded whole."""
        if any(spec.spent for spec in self.weight_type.tensors(self.config)):
            return Weights(self.storage(), loader=self.loader()).get_weights(PREFIX)
        fields: dict[str, Any] = {"config": self.config, **self.tensors}
        return self.weight_type(**fields)

    def __repr__(self) -> str:
        return f"DrawnLayer({self.config}, {self.sizes}, {self.drawn})"


@st.composite
def layers(
    draw: st.DrawFn,
    weight_type: type[Weight],
    configs: st.SearchStrategy[Any],
    *,
    N: int | None = None,
    K: int | None = None,
    most: int = 4,
    fillings: tuple[str, ...] = FILLINGS,
) -> DrawnLayer:
    """A Hypothesis strategy for layers of a format, from the format's own declaration of its tensors.

    Parameters
    ----------
    draw
        Given by Hypothesis.
    weight_type, configs
        The format: the type of its typed weights, and a strategy for configs.
    N, K
        Sizes; None: `most` granules of the axes at the most.
    most
        How many granules.
    fillings
        What the tensors may be filled with, the simplest first: "zeros", "count" or "noise".
    """
    config = draw(configs)
    specs = weight_type.tensors(config)
    sizes = draw(_sizes(specs, {"N": N, "K": K}, most))
    facts = FACTS[weight_type](config, sizes) if weight_type in FACTS else {}
    filling = draw(st.sampled_from(fillings))
    act_order = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    tensors = facts | {
        spec.name: _index(spec, specs, sizes, act_order, generator)
        if spec.index_of
        else _FILL[spec.role](spec, _shape(spec, sizes), filling, generator)
        for spec in specs
        if not spec.optional and spec.name not in facts
    }
    return DrawnLayer(weight_type, config, tensors, sizes, f"{filling}{', act order' * act_order}")


@st.composite
def _sizes(
    draw: st.DrawFn, specs: tuple[TensorSpec, ...], given: dict[str, int | None], most: int
) -> dict[str, int]:
    axes = [axis for spec in specs for axis in spec.axes]
    flat = [axis.granule for axis in axes if axis.flat]
    unit = lcm(*flat) // draw(st.sampled_from([1, 4, 7])) or 1 if flat else 1  # blocks end within rows too
    sizes: dict[str, int] = {}
    for dim in sorted({dim for axis in axes for dim in LOGICAL if axis.follows(dim)}):
        granule = lcm(unit, *(axis.granule for axis in axes if axis.dim == dim and not axis.rounds))
        sizes[dim] = given[dim] or granule * draw(st.integers(1, most), label=f"granules of {dim}")
    for axis in axes:
        letter = axis.free or axis.dim
        if letter.isalpha() and letter not in sizes:
            sizes[letter] = axis.size(sizes[axis.dim]) or 1 if axis.free else 1
    return sizes


def _shape(spec: TensorSpec, sizes: dict[str, int]) -> list[int]:
    return [_extent(axis, sizes) for axis in spec.axes]


def _extent(axis: Axis, sizes: dict[str, int]) -> int:
    if axis.free:
        return sizes[axis.free]
    return axis.size(axis.logical(sizes) or 0) or 0


def _index(
    spec: TensorSpec,
    specs: tuple[TensorSpec, ...],
    sizes: dict[str, int],
    act_order: bool,
    generator: torch.Generator,
) -> Tensor:
    """Groups in order, or the same groups with their rows exchanged."""
    groups = [axis for other in specs for axis in other.axes if axis.free == spec.index_of]
    size = groups[0].ops[-1][1] if groups else sizes["K"]
    index = torch.arange(sizes["K"]) // size
    if act_order:
        index = index[torch.randperm(sizes["K"], generator=generator)]
    return index.to(spec.dtypes[0])


def _words(spec: TensorSpec, shape: list[int], filling: str, generator: torch.Generator) -> Tensor:
    if spec.dtypes[0].is_floating_point:  # small floats, whose bytes are the codes
        return _small_floats(spec, shape, filling, generator)
    limits = torch.iinfo(spec.dtypes[0])
    if spec.nibbles:
        return _nibbles(spec, shape, filling, generator)
    if filling == "noise":  # every bit, the sign's too
        return torch.randint(limits.min, limits.max + 1, shape, dtype=spec.dtypes[0], generator=generator)
    return _count(shape, 0 if filling == "zeros" else 1).to(spec.dtypes[0])


def _small_floats(spec: TensorSpec, shape: list[int], filling: str, generator: torch.Generator) -> Tensor:
    """Every byte that is a finite number, or numbers that every small float holds."""
    if filling != "noise":
        return _floats(spec, shape, filling, generator)
    finite = torch.arange(256).to(torch.uint8).view(spec.dtypes[0])
    finite = finite[finite.float().isfinite()]
    return finite.view(torch.uint8)[torch.randint(len(finite), shape, generator=generator)].view(finite.dtype)


def _nibbles(spec: TensorSpec, shape: list[int], filling: str, generator: torch.Generator) -> Tensor:
    """Words whose every four bits are a value that the declaration allows."""
    fields = torch.iinfo(spec.dtypes[0]).bits // 4
    choice = torch.randint(len(spec.nibbles), [*shape, fields], generator=generator)
    if filling != "noise":
        choice = _count([*shape, fields], 0 if filling == "zeros" else 1) % len(spec.nibbles)
    values = torch.tensor(spec.nibbles)[choice] << (4 * torch.arange(fields))
    return values.sum(-1).to(spec.dtypes[0])


def _scales(spec: TensorSpec, shape: list[int], filling: str, generator: torch.Generator) -> Tensor:
    if not spec.dtypes[0].is_floating_point:  # the exponent alone, 127 for 1
        powers = (
            torch.randint(-6, 7, shape, generator=generator)
            if filling == "noise"
            else _count(shape, 1) % 4 - 2
        )
        return (powers + 127).to(spec.dtypes[0])
    if filling == "noise":
        return (torch.rand(shape, generator=generator) + 2.0**-6).to(spec.dtypes[0])
    return (2.0 ** (_count(shape, 1) % 4 - 2)).to(spec.dtypes[0])


def _floats(spec: TensorSpec, shape: list[int], filling: str, generator: torch.Generator) -> Tensor:
    if filling == "noise":
        return torch.randn(shape, generator=generator).to(spec.dtypes[0])
    return (_count(shape, 0 if filling == "zeros" else 1) % 17 - 8).to(spec.dtypes[0])


def _count(shape: list[int], step: int) -> Tensor:
    count = 1
    for extent in shape:
        count *= extent
    return (torch.arange(count) * step).reshape(shape)


_FILL: dict[Role, Callable[[TensorSpec, list[int], str, torch.Generator], Tensor]] = {
    Role.WORD: _words,
    Role.SCALE: _scales,
    Role.FLOAT: _floats,
}
