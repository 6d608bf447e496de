"""`StackedWeight`: one matrix of all experts of a layer, loaded by its stored name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from qload.errors import ArgumentError, UnsupportedFormatError, check_fields
from qload.experts.stack import Stack
from qload.experts.stacking import Stacking
from qload.experts.stacks import StackedLayers
from qload.formats import UnquantizedConfig
from qload.loader import Part, Split, TensorSource, WeightsLoader
from qload.spec import Codes, Config, TensorSpec, Weight, check_out


@dataclass(frozen=True, eq=False, repr=False)
class StackedWeight(Weight):
    """One matrix of all experts, or a share of each expert: (E, N, K).

    It cannot multiply; `expert` gives a layer that can. Joined gate and up are one layer, the gate's outputs
    first.

    Attributes
    ----------
    stack
        The layers.
    """

    stack: Stack

    format: ClassVar[str] = "stack"
    example: ClassVar[Config] = UnquantizedConfig()

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def tensors(cls, config: Any) -> tuple[TensorSpec, ...]:
        """No tensors of its own: the experts' tensors have one axis more here."""
        return ()

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, N, K): experts, outputs, inputs of this share."""
        return self.stack.shape

    def fields(self) -> dict[str, Tensor]:
        """The stacked tensors by field name, (E, ...) each."""
        return self.stack.fields()

    def expert(self, index: int) -> Weight:
        """The layer of the expert `index`: a view, no copy. ArgumentError for an index of no expert."""
        return self.stack.expert(index)

    def codes(self) -> Codes:
        """Raise UnsupportedFormatError: each expert has codes of its own."""
        raise UnsupportedFormatError(
            f"{self.layer.name}: {self.stack.format} of several experts",
            "codes are those of one layer",
            remedy="take expert(index).codes()",
        )

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """Dequantize all experts to (E, N, K) in a `dtype`, or into `out` in its dtype."""
        if out is not None:
            check_out(out, self.shape, self.device)
        made = torch.empty(self.shape, dtype=dtype, device=self.device) if out is None else out
        for index, place in enumerate(made):
            self.stack.dequantize(index, out=place)
        return made

    def to(self, device: torch.device | str) -> Self:
        """The same weight on another `device`; no dtype changes."""
        return replace(self, stack=self.stack.to(device))

    def holding(self, tensors: Mapping[str, Tensor]) -> Self:
        """The same weight holding these `tensors`, which are taken to be equal and not checked again."""
        return replace(self, stack=self.stack.holding(tensors))

    def __repr__(self) -> str:
        return f"StackedWeight({self.stack!r})"


def load_stacked(
    loader: WeightsLoader, source: TensorSource, prefix: str, layers: StackedLayers, split: Split | None
) -> StackedWeight:
    """Load one matrix of all experts by its stored name; each expert is cut along `split`.

    UnsupportedFormatError for interleaved gate and up; ArgumentError for a cut of joined gate and up.
    """
    if layers.interleaved:
        raise UnsupportedFormatError(
            f"{prefix}: interleaved outputs of {' and '.join(layers.layers)}",
            "one layer cannot have both",
            remedy=f"load {layers.of(0)[0]} and so on, or get_experts({layers.lead!r})",
        )
    if split is not None and len(layers.layers) > 1:
        expected = f"{' or '.join(layers.of(0))}, or get_experts({layers.lead!r}, split='tensor')"
        raise ArgumentError("prefix", expected, f"{prefix}, which is several layers")
    stacking = Stacking(prefix, layers.count)
    for expert in range(layers.count):
        stacking.put(loader.load(source, _parts(layers.of(expert)), split))
    stack = stacking.stack()
    return StackedWeight(stack, config=stack.config, layer=stack.layer)


def _parts(prefixes: Sequence[str]) -> list[Part]:
    return [Part(prefix) for prefix in prefixes]
