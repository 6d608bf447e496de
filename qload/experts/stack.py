"""`Stack`: one matrix of each expert of a layer, of one format and shape, in stacked tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from qload.errors import ArgumentError, ShapeError, check_fields, checked
from qload.spec import Layer, Weight


@dataclass(frozen=True, eq=False)
class Stack:
    """E layers of one format, config and shape: of each tensor a stack (E, ...).

    ShapeError where the tensors are not all of as many experts as `names` has.

    Attributes
    ----------
    weight_type, config, layer
        Of each expert; the layer's own name is that of all experts together.
    names
        Of the E layers, one an expert.
    tensors
        By field, (E, ...) each: entry e is that tensor of expert e as it is stored.
    """

    weight_type: type[Weight]
    config: Any
    layer: Layer
    names: tuple[str, ...]
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        check_fields(self)
        for field, tensor in self.tensors.items():
            if tensor.shape[:1] != (len(self.names),):
                expected = f"({len(self.names)}, ...), one for each expert"
                raise ShapeError(f"{self.layer.name}: {field}", expected, tuple(tensor.shape))

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Weight]:
        return (self._view(index) for index in range(len(self)))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K): experts that are here, and of each the outputs and inputs that are."""
        return len(self), self.layer.N, self.layer.K

    @property
    def format(self) -> str:
        """The name of the experts' format."""
        return self.weight_type.format

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return next(iter(self.tensors.values())).device

    @property
    def is_k_full(self) -> bool:
        """Whether input i is of group i / group_size, counted from the first input that is here.

        False of a share of the inputs whose groups lie in act order, or straddle two ranks: it has the scales
        of all groups, and the index says which.
        """
        _, whole = self.layer.whole
        if whole == self.layer.K:
            return True
        said = getattr(self.config, "is_k_full", None)
        return said if isinstance(said, bool) else not any(self._groups_of_others())

    def fields(self) -> dict[str, Tensor]:
        """The stacked tensors by field name; an absent optional one is left out."""
        return dict(self.tensors)

    @checked
    def expert(self, index: int) -> Weight:
        """The layer (N, K) of the expert `index`, counted from the first that is here: a view, no copy.

        ArgumentError where there is no such expert.
        """
        if not 0 <= index < len(self):
            raise ArgumentError("index", f"an expert that is here, 0 to {len(self) - 1}", str(index))
        return self._view(index)

    def dequantize(self, index: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """(N, K): what the expert `index` means, as `Weight.dequantize` with this `dtype` or `out`."""
        return self.expert(index).dequantize(dtype, out)

    @checked
    def to(self, device: torch.device | str) -> Self:
        """The same stack on another `device`; no dtype changes."""
        return self.holding({field: tensor.to(device) for field, tensor in self.tensors.items()})

    def holding(self, tensors: Mapping[str, Tensor]) -> Self:
        """The same stack holding these `tensors`, which are taken to be equal."""
        return replace(
            self, tensors={field: tensors.get(field, held) for field, held in self.tensors.items()}
        )

    def _view(self, index: int) -> Weight:
        held = {field: tensor[index] for field, tensor in self.tensors.items()}
        layer = replace(self.layer, name=self.names[index])
        return self.weight_type.unchecked(self.config, layer, held)

    def _groups_of_others(self) -> Iterator[bool]:
        """Of each axis that an index points into: whether it has more groups than the inputs here."""
        specs = [spec for spec in self.weight_type.tensors(self.config) if spec.name in self.tensors]
        letters, sizes = {spec.index_of for spec in specs} - {None}, {"N": self.layer.N, "K": self.layer.K}
        for spec in specs:
            for axis, size in zip(spec.axes, self.tensors[spec.name].shape[1:], strict=True):
                if letters & {axis.free, axis.dim}:
                    own = axis.size(axis.logical(sizes) or 0) if axis.free else 1
                    yield size not in (1, own)

    def __repr__(self) -> str:
        held = ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"Stack({self.layer.name or 'experts'}, {self.shape}, {self.format}, {self.config}, {held})"
