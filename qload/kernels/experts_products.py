"""The products of experts: each matrix of an expert goes the way of the same matrix as a layer of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from qload.kernels import cpu
from qload.kernels.cpu_rows import KeptRows
from qload.kernels.declared import Activations, Maximum
from qload.kernels.reference import product
from qload.kernels.routed import RoutedTokens
from qload.spec import Weight


class KeptMatrix:
    """One matrix of an expert as a typed weight, and what a CPU keeps of it from call to call."""

    def __init__(self, weight: Weight) -> None:
        self.weight, self.rows = weight, KeptRows()
        self._plan = cpu.plan_of(weight)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor | None:
        """Rows (n, K) -> (n, N) in float32, by the CPU module, or None."""
        y = None if self._plan is None else self._plan.multiply(rows, bias, torch.float32)
        return cpu.multiply(rows, self.weight, bias, kept=self.rows, dtype=torch.float32) if y is None else y


class KeptStack:
    """The experts of a stack that were multiplied, for as long as its tensors lie where they lay."""

    def __init__(self) -> None:
        self._kept: tuple[Any, dict[int, KeptMatrix]] = (), {}  # replaced as a whole: threads may share it

    def of(self, stack: Any, experts: Sequence[int]) -> list[KeptMatrix]:
        """The matrices of some `experts` of a `stack`."""
        seen = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in stack.tensors.values()]
        before, found = self._kept
        if seen != before:
            found = {}
            self._kept = seen, found
        for expert in experts:
            if expert not in found:
                found[expert] = KeptMatrix(stack.expert(expert))
        return [found[expert] for expert in experts]


@dataclass(frozen=True, eq=False)
class KeptExperts:
    """What calls found out about the experts of a layer, by the names of its stacks."""

    gate_up: KeptStack = field(default_factory=KeptStack)
    down: KeptStack = field(default_factory=KeptStack)

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew: the tensors of a copy lie elsewhere."""
        return KeptExperts, ()


@dataclass(frozen=True, eq=False)
class ExpertProducts:
    """How rows are multiplied with the matrices of experts.

    Attributes
    ----------
    weight
        An `ExpertsWeight`.
    activations, maximum
        As its `get_linear` has them.
    narrow
        What both sides of a product are rounded to where no kernel of a CPU multiplies.
    rounded
        What rows that are multiplied as they come are rounded to before; None: they stay.
    kept
        What earlier calls found out.
    """

    weight: Any
    activations: Activations
    maximum: Maximum
    narrow: torch.dtype
    rounded: torch.dtype | None
    kept: KeptExperts

    def __call__(self, name: Literal["gate_up", "down"], run: RoutedTokens, rows: Tensor) -> Tensor:
        """Rows (P, K) of a run of experts, each times the matrix of its own: (P, N), in float32 at least."""
        stack, biases = getattr(self.weight, name), getattr(self.weight, f"{name}_bias")
        as_it_comes = self.activations == "unquantized" or stack.layer.activations is None
        if as_it_comes and self.rounded is not None:
            rows = rows.to(self.rounded)
        matrices: Sequence[KeptMatrix | None] = [None] * len(run.places)
        if rows.device.type == "cpu":
            matrices = getattr(self.kept, name).of(stack, run.places)
        parts = []
        of_each = torch.split(rows, list(run.counts))
        for expert, some, kept in zip(run.places, of_each, matrices, strict=True):
            bias = None if biases is None else biases[expert]
            made = None if kept is None or not as_it_comes else kept.multiply(some, bias)
            if made is None and kept is not None and as_it_comes:
                cpu.advise_panels(some, kept.weight)
            parts.append(self._otherwise(some, stack, expert, bias, kept) if made is None else made)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _otherwise(
        self, rows: Tensor, stack: Any, expert: int, bias: Tensor | None, kept: KeptMatrix | None
    ) -> Tensor:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        weight, of_rows = (stack.expert(expert), None) if kept is None else (kept.weight, kept.rows)
        return product(wide, weight, bias, self.activations, self.maximum, self.narrow, of_rows)
