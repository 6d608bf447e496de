"""Typed weights that were just made, cut by their own declaration as if they were stored."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from qload.errors import MismatchError, MissingTensorError
from qload.loader import ConfiguredFormat, FormatLoader, ModuleLoader, Part, Split
from qload.parallel import ProcessGroup
from qload.spec import Role, Weight, named
from qload.storage import TensorInfo
from qload.storage.protocol import missing


def cut(
    layers: Mapping[str, Weight], group: ProcessGroup, parts: Sequence[Part], split: Split | None
) -> Weight:
    """A share of typed weights, by their own declaration."""
    first, *others = layers.values()
    for other in others:
        if (type(other), other.config) != (type(first), first.config):
            raise MismatchError(
                other.layer.name,
                "parts of a fused layer are quantized in two ways",
                f"{first.config} as {first.layer.name}",
                str(other.config),
            )
    own = [
        (name.__eq__, FormatLoader(ConfiguredFormat(type(made), made.config)))
        for name, made in layers.items()
    ]
    return ModuleLoader(own, own[0][1]).load(InMemorySource(layers, group), parts, split)


class InMemorySource:
    """Typed weights in memory as a source of tensors, so that they are cut as stored ones are."""

    def __init__(self, layers: Mapping[str, Weight], group: ProcessGroup) -> None:
        self.process_group = group
        self.tensors: dict[str, Tensor] = {
            named(prefix, spec.suffix): weight.fields()[spec.name]
            for prefix, weight in layers.items()
            for spec in weight.tensors(weight.config)
            if spec.name in weight.fields()
        }

    def has_tensor(self, name: str) -> bool:
        """Whether a typed weight holds it."""
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape."""
        tensor = self._find(name)
        return TensorInfo(tensor.dtype, tuple(tensor.shape))

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """A copy of those elements."""
        return self._find(name)[index].clone(memory_format=torch.contiguous_format)

    def take(self, names: Iterable[str]) -> None:
        """The ledger counts what was stored, which the inner loader has entered."""

    def note(self, text: str) -> None:
        """What was just made has nothing to disagree with."""

    def missing(self, name: str, hint: str = "") -> MissingTensorError:
        """The error for a name that is not there."""
        return missing(name, self.tensors)

    def _find(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise self.missing(name)
        return self.tensors[name]
