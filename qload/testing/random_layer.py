"""Random layers as stored tensors, from the declaration of a format, sizes and a filling.

No format is named in this module; `qload.testing.layer_factory` has the facts that declarations leave open.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qload.dtypes import TORCH
from qload.loader import ConfiguredFormat, FormatLoader
from qload.spec import Axis, Config, Role, TensorSpec, Weight, named
from qload.storage import MemoryStorage
from qload.weights import Weights

PREFIX = "layer"
RANDOM = ("noise", "coded")


@dataclass(frozen=True, repr=False)
class DrawnLayer:
    """A random layer as stored tensors.

    Attributes
    ----------
    weight_type, config
        The format: the type of the typed weight, and the config.
    tensors
        By field.
    sizes
        Logical sizes by letter: N, K and those of free axes.
    drawn
        A description for messages.
    """

    weight_type: type[Weight]
    config: Config
    tensors: dict[str, Tensor]
    sizes: dict[str, int]
    drawn: str

    @property
    def N(self) -> int:
        """The number of outputs."""
        return self.sizes["N"]

    @property
    def K(self) -> int:
        """The number of inputs; 1 for a vector."""
        return self.sizes.get("K", 1)

    def named(self, prefix: str = PREFIX) -> dict[str, Tensor]:
        """Return the tensors by stored name, for a layer called `prefix`."""
        suffixes = {spec.name: spec.suffix for spec in self.weight_type.tensors(self.config)}
        return {named(prefix, suffixes[name]): tensor for name, tensor in self.tensors.items()}

    def storage(self, prefix: str = PREFIX) -> MemoryStorage:
        """Return a storage of this layer alone, called `prefix`."""
        return MemoryStorage(self.named(prefix))

    def loader(self) -> FormatLoader:
        """Return the loader of its format."""
        return FormatLoader(ConfiguredFormat(self.weight_type, self.config))

    def weight(self) -> Weight:
        """Return the typed weight: loaded if a load consumes some of its tensors, else constructed."""
        if any(spec.spent for spec in self.weight_type.tensors(self.config)):
            return Weights(self.storage(), loader=self.loader()).get_weights(PREFIX)
        fields: dict[str, Any] = {"config": self.config, **self.tensors}
        return self.weight_type(**fields)

    def __repr__(self) -> str:
        return f"DrawnLayer({self.config}, {self.sizes}, {self.drawn})"


def complete_sizes(specs: tuple[TensorSpec, ...], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return `sizes` by letter, including N and K, with the sizes of free axes that follow from them."""
    completed = dict(sizes)
    for axis in (axis for spec in specs for axis in spec.axes):
        letter = axis.free or axis.dim
        if letter.isalpha() and letter not in completed:
            completed[letter] = axis.size(completed[axis.dim]) or 1 if axis.free else 1
    return completed


def fill_layer(
    weight_type: type[Weight],
    config: Config,
    sizes: dict[str, int],
    facts: Mapping[str, Tensor],
    filling: str,
    act_order: bool,
    generator: torch.Generator,
) -> DrawnLayer:
    """Return a layer of these `sizes` by letter; all tensors but `facts` have a `filling`.

    "zeros", "count", "noise", or "coded": random bits of codes and powers of two for scales, so that
    exchanged weights are wrong numbers and sums are exact.
    """
    specs = weight_type.tensors(config)
    tensors = dict(facts) | {
        spec.name: _fill_index(spec, specs, sizes, act_order, generator)
        if spec.index_of
        else _FILL[spec.role](spec, _shape(spec, sizes), filling, generator)
        for spec in specs
        if not spec.optional and spec.name not in facts
    }
    return DrawnLayer(weight_type, config, tensors, sizes, f"{filling}{', act order' * act_order}")


def _shape(spec: TensorSpec, sizes: dict[str, int]) -> list[int]:
    return [_extent(axis, sizes) for axis in spec.axes]


def _extent(axis: Axis, sizes: dict[str, int]) -> int:
    if axis.free:
        return sizes[axis.free]
    return axis.size(axis.logical(sizes) or 0) or 0


def _fill_index(
    spec: TensorSpec,
    specs: tuple[TensorSpec, ...],
    sizes: dict[str, int],
    act_order: bool,
    generator: torch.Generator,
) -> Tensor:
    """Groups in order, or with shuffled rows."""
    groups = [axis for other in specs for axis in other.axes if axis.free == spec.index_of]
    size = groups[0].ops[-1][1] if groups else sizes["K"]
    index = torch.arange(sizes["K"]) // size
    if act_order:
        index = index[torch.randperm(sizes["K"], generator=generator)]
    return index.to(TORCH[spec.dtypes[0]])


def _fill_words(spec: TensorSpec, shape: list[int], filling: str, generator: torch.Generator) -> Tensor:
    if TORCH[spec.dtypes[0]].is_floating_point:  # the bytes of small floats are codes
        return _fill_small_floats(spec, shape, filling, generator)
    limits = torch.iinfo(TORCH[spec.dtypes[0]])
    if spec.nibbles:
        return _fill_nibbles(spec, shape, filling, generator)
    if spec.between:
        low, high = spec.between
        drawn = torch.randint(low, high + 1, shape, generator=generator)
        counted = _count(shape, 0 if filling == "zeros" else 1).clamp(low, high)
        return (drawn if filling in RANDOM else counted).to(TORCH[spec.dtypes[0]])
    if filling in RANDOM:  # every bit, also the sign
        return torch.randint(
            limits.min, limits.max + 1, shape, dtype=TORCH[spec.dtypes[0]], generator=generator
        )
    return _count(shape, 0 if filling == "zeros" else 1).to(TORCH[spec.dtypes[0]])


def _fill_small_floats(
    spec: TensorSpec, shape: list[int], filling: str, generator: torch.Generator
) -> Tensor:
    """Random finite numbers of all bytes, or numbers that are exact in every small float."""
    if filling != "noise":
        return _fill_floats(spec, shape, filling, generator)
    finite = torch.arange(256).to(torch.uint8).view(TORCH[spec.dtypes[0]])
    finite = finite[finite.float().isfinite()]
    return finite.view(torch.uint8)[torch.randint(len(finite), shape, generator=generator)].view(finite.dtype)


def _fill_nibbles(spec: TensorSpec, shape: list[int], filling: str, generator: torch.Generator) -> Tensor:
    """Words of nibbles from the values of the declaration."""
    fields = torch.iinfo(TORCH[spec.dtypes[0]]).bits // 4
    choice = torch.randint(len(spec.nibbles), [*shape, fields], generator=generator)
    if filling not in RANDOM:
        choice = _count([*shape, fields], 0 if filling == "zeros" else 1) % len(spec.nibbles)
    values = torch.tensor(spec.nibbles)[choice] << (4 * torch.arange(fields))
    return values.sum(-1).to(TORCH[spec.dtypes[0]])


def _fill_scales(spec: TensorSpec, shape: list[int], filling: str, generator: torch.Generator) -> Tensor:
    if not TORCH[spec.dtypes[0]].is_floating_point:  # an exponent, 127 for 1
        powers = (
            torch.randint(-6, 7, shape, generator=generator)
            if filling in RANDOM
            else _count(shape, 1) % 4 - 2
        )
        return (powers + 127).to(TORCH[spec.dtypes[0]])
    if filling == "noise":
        return (torch.rand(shape, generator=generator) + 2.0**-6).to(TORCH[spec.dtypes[0]])
    if filling == "coded":
        return (2.0 ** torch.randint(-2, 2, shape, generator=generator)).to(TORCH[spec.dtypes[0]])
    return (2.0 ** (_count(shape, 1) % 4 - 2)).to(TORCH[spec.dtypes[0]])


def _fill_floats(spec: TensorSpec, shape: list[int], filling: str, generator: torch.Generator) -> Tensor:
    if filling == "noise":
        return torch.randn(shape, generator=generator).to(TORCH[spec.dtypes[0]])
    if filling == "coded":
        return torch.randint(-8, 9, shape, generator=generator).to(TORCH[spec.dtypes[0]])
    return (_count(shape, 0 if filling == "zeros" else 1) % 17 - 8).to(TORCH[spec.dtypes[0]])


def _count(shape: list[int], step: int) -> Tensor:
    count = 1
    for extent in shape:
        count *= extent
    return (torch.arange(count) * step).reshape(shape)


_FILL: dict[Role, Callable[[TensorSpec, list[int], str, torch.Generator], Tensor]] = {
    Role.WORD: _fill_words,
    Role.SCALE: _fill_scales,
    Role.FLOAT: _fill_floats,
}
