"""Layers with a kernel and an exact product, which compare the two on each input.

A model continues with exact products, so that the first faulty layer does not hide later ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qload.diagnosis.diagnosis import explain_errors
from qload.kernels import bounds
from qload.kernels.bounds import Bounded, excess, of_experts
from qload.kernels.declared import Maximum
from qload.spec import Weight

MAX_ONE_HOT = 256  # inputs of a read-back in one call
Place = tuple[str, tuple[int, ...]]  # a layer, and (n,) or (n, k) in it
# A place in a weight, the kernel's value, the exact value, and the known fault that explains it, or None.
Misread = tuple[Place, float, float, str | None]
ReadBack = Callable[[], Misread | None]
MAX_DIAGNOSED = 1 << 22  # values of a weight for the diagnosis of a fault


@dataclass(frozen=True)
class ProductFault:
    """A layer with a larger error of its product than rounding explains.

    Attributes
    ----------
    name
        Name of the layer.
    token, output
        Worst place of its result.
    got, want
        Computed and exact value at this place.
    budget
        Largest error by rounding.
    wrong, total
        Number of values with a larger error, and number of all values.
    """

    name: str
    token: int
    output: int
    got: float
    want: float
    budget: float
    wrong: int
    total: int


@dataclass
class CompareState:
    """State shared by the compared layers of a model: how it continues, and the results so far.

    Attributes
    ----------
    follows
        "meaning": the model continues with exact products; "kernel": with kernels, without a comparison.
    faults
        Layer name -> its first fault, and a function that reads its weight back.
    kernels
        Layer name -> order of its kernel.
    worst
        Layer name -> its largest error as a part of the rounding budget.
    overflown
        Layers with inputs or results beyond the range of their type.
    report_bytes
        Called with the bytes of each compared weight.
    compares
        False to skip kernels if `follows` is "meaning".
    """

    follows: Literal["meaning", "kernel"] = "meaning"
    compares: bool = True
    report_bytes: Callable[[int], None] = field(default=lambda size: None)
    faults: dict[str, tuple[ProductFault, ReadBack]] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    overflown: dict[str, None] = field(default_factory=dict)

    def compare(self, name: str, x: Tensor, y: Tensor, want: Bounded) -> tuple[int, int, float, int] | None:
        """Return the worst place of y (T, N), its budget, and the number of faults; None without a fault."""
        off = excess(y, want)
        largest = torch.finfo(y.dtype).max
        fits = (want.value.abs() + want.error < largest) & x.isfinite().all(-1, keepdim=True)
        if not bool(fits.all()):
            self.overflown[name] = None
        errors = torch.where(fits, off.nan_to_num(torch.inf), 0.0)
        self.worst[name] = max(self.worst.get(name, 0.0), float(errors.max()) if errors.numel() else 0.0)
        wrong = int((errors > 1).sum())
        if not wrong:
            return None
        token, output = divmod(int(errors.argmax()), errors.shape[1])
        return token, output, float(want.rounded_to(y.dtype).error[token, output]), wrong


class ComparedLayer(nn.Module, ABC):
    """Base of layers with a kernel and an exact product.

    Parameters
    ----------
    meaning
        Loaded weight of the exact product, or experts.
    name
        Name of the layer.
    kernel
        Module of the kernel; None for the exact product alone.
    state
        State of the model.
    """

    def __init__(self, meaning: Any, name: str, kernel: nn.Module | None, state: CompareState) -> None:
        super().__init__()
        self.meaning, self.name, self.kernel, self.state = meaning, name, kernel, state

    @property
    def typed(self) -> Any:
        """Loaded weight, or experts, as of the module of a kernel."""
        return self.meaning

    def forward(self, x: Tensor, *routing: Tensor) -> Tensor:
        """Compute (..., N) of x (..., K), in its dtype; `routing`: ids and weights (T, k) of experts."""
        if self.state.follows == "kernel":
            assert self.kernel is not None
            y: Tensor = self.kernel(x, *routing)
            return y
        rows = x.reshape(-1, x.shape[-1])
        want = self.exact(rows, *routing)
        if self.kernel is not None and self.state.compares:
            self._compare(self.kernel(rows, *routing), want, rows, *routing)
            self.state.report_bytes(weight_bytes(self.meaning))
        return want.value.to(x.dtype).reshape(*x.shape[:-1], -1)

    @abstractmethod
    def exact(self, rows: Tensor, *routing: Tensor) -> Bounded:
        """Return the exact result of rows (T, K) with the error bound of a kernel."""

    @abstractmethod
    def locate(self, token: int, output: int, rows: Tensor, *routing: Tensor) -> tuple[Place, ReadBack]:
        """Return the place of a wrong output of a `token`, and the function that reads the weight back."""

    def _compare(self, y: Tensor, want: Bounded, rows: Tensor, *routing: Tensor) -> None:
        worst = self.state.compare(self.name, rows, y, want)
        if worst is None:
            return
        token, output, budget, wrong = worst
        (name, (n, *_)), read_back = self.locate(token, output, rows, *routing)
        values = float(y[token, output]), float(want.value[token, output]), budget, wrong, y.numel()
        self.state.faults.setdefault(self.name, (ProductFault(name, token, n, *values), read_back))


class ComparedLinear(ComparedLayer):
    """Linear layer (..., K) -> (..., N) with a kernel and an exact product.

    Parameters
    ----------
    weight, bias
        Loaded weight of the exact product, and bias (N,) or None.
    kernel
        Module of the kernel; None for the exact product alone.
    maximum
        As in `Weight.get_linear`.
    converted
        True if the kernel's scales were rounded to the type of the activations.
    state
        State of the model.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        kernel: nn.Module | None,
        maximum: Maximum,
        converted: bool,
        state: CompareState,
    ) -> None:
        super().__init__(weight, weight.layer.name, kernel, state)
        self.maximum, self.converted = maximum, converted
        self.register_buffer("bias", bias)

    def exact(self, rows: Tensor, *routing: Tensor) -> Bounded:
        """Return the exact product of rows (T, K) with the error bound of a kernel."""
        bias = self._buffers["bias"]
        return bounds.of_linear(rows, self.meaning, bias, "declared", self.maximum, converted=self.converted)

    def locate(self, token: int, output: int, rows: Tensor, *routing: Tensor) -> tuple[Place, ReadBack]:
        """Return the part of a fused layer with an output, and the function that reads the weight back."""
        return place_in_part(self.meaning, (output,)), partial(self.read_back, rows.dtype)

    def read_back(self, dtype: torch.dtype) -> Misread | None:
        """Return the first wrong value of the kernel's weight, by one-hot inputs of a `dtype`."""
        for start, y, want in self._one_hot_products(dtype):
            wrong = (~(excess(y, want) <= 1)).nonzero()
            if wrong.numel():
                k, n = wrong[0].tolist()
                read = float(y[k, n]), float(want.value[k, n])
                return place_in_part(self.meaning, (n, start + k)), *read, self._diagnose(n, dtype)
        return None

    def _diagnose(self, n: int, dtype: torch.dtype) -> str | None:
        """Return in words the known fault that explains the outputs around `n`; None without one."""
        N, K = self.meaning.layer.N, self.meaning.layer.K
        size = min(N, max(1, MAX_DIAGNOSED // K))
        first = min(n // size * size, N - size)
        got, want = [], []
        for _, y, exact in self._one_hot_products(dtype):
            got.append(y[:, first : first + size].T)
            want.append(exact.value[:, first : first + size].T.float())
        bias = self._buffers["bias"]
        added = None if bias is None else bias[first : first + size]
        return explain_errors(torch.cat(want, 1), torch.cat(got, 1), self.meaning, first, added)

    def _one_hot_products(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Bounded]]:
        """Yield runs of one-hot inputs: the first input, the kernel's results, and the exact ones."""
        K, device = self.meaning.layer.K, self.meaning.device
        assert self.kernel is not None
        for start in range(0, K, MAX_ONE_HOT):
            rows = torch.eye(min(MAX_ONE_HOT, K - start), K, dtype=dtype, device=device).roll(start, 1)
            yield start, self.kernel(rows), self.exact(rows)


class ComparedExperts(ComparedLayer):
    """Experts of a layer with a kernel and exact products.

    Parameters
    ----------
    experts
        Loaded `ExpertsWeight` of the exact products.
    repacked
        The same experts in the order of the kernel.
    kernel
        Module of the kernel; None for the exact products alone.
    state
        State of the model.
    """

    def __init__(self, experts: Any, repacked: Any, kernel: nn.Module | None, state: CompareState) -> None:
        super().__init__(experts, experts.gate_up.layer.name, kernel, state)
        self.repacked = repacked

    def exact(self, rows: Tensor, *routing: Tensor) -> Bounded:
        """Return the exact results of rows (T, H) with the error bound of a kernel."""
        ids, weights = routing
        return of_experts(rows, ids, weights, self.meaning)

    def locate(self, token: int, output: int, rows: Tensor, *routing: Tensor) -> tuple[Place, ReadBack]:
        """Return the place of an output of the experts, and the function that reads their weights back."""
        return (self.name, (output,)), partial(self.read_back, routing[0][token].tolist())

    def read_back(self, chosen: list[int]) -> Misread | None:
        """Return the first value of a matrix of `chosen` experts that differs in the order of the kernel.

        One process has all experts, so each has its own number.
        """
        for expert in sorted(set(chosen)):
            matrices = zip(self.meaning.expert(expert), self.repacked.expert(expert), strict=True)
            for exact, repacked in matrices:
                want, got = exact.dequantize(), repacked.dequantize()
                wrong = (got != want).nonzero()
                if wrong.numel():
                    n, k = wrong[0].tolist()
                    values = float(got[n, k]), float(want[n, k])
                    return place_in_part(exact, (n, k)), *values, explain_errors(want, got, exact)
        return None


def place_in_part(weight: Weight, place: tuple[int, ...]) -> Place:
    """Return the layer of an output of a fused layer, and the place in it: (n, ...)."""
    names, parts, n = weight.layer.name.split(", "), weight.layer.parts, place[0]
    if len(names) != len(parts):
        return weight.layer.name, place
    for name, width in zip(names, parts, strict=True):
        if n < width:
            return name, (n, *place[1:])
        n -= width
    return weight.layer.name, place


def weight_bytes(weight: Any) -> int:
    """Return the bytes of a weight's tensors, or of the experts of a layer."""
    return sum(tensor.nbytes for tensor in weight.fields().values())


def linears_of(layer: nn.Module) -> Iterator[ComparedLinear]:
    """Yield the compared linear layers inside a layer of a model, in the order of their outputs."""
    return (module for module in layer.modules() if isinstance(module, ComparedLinear))
