"""Layers that hold what multiplies beside what the weight means, and compare the two on each input they get.

A model goes on with what the weight means, so that the first layer that departs is not hidden by what it does
to all others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qload.diagnosis.diagnosis import explained
from qload.kernels import bounds
from qload.kernels.bounds import Bounded, excess
from qload.kernels.declared import Maximum
from qload.kernels.gated_bounds import of_experts
from qload.spec import Weight

ONE_HOT = 256  # inputs of a read-back at once
Place = tuple[str, tuple[int, ...]]  # a layer, and (n,) or (n, k) in it
# A number of a weight, what a kernel has there, what is meant, and the known fault that explains it, if any.
Misread = tuple[Place, float, float, str | None]
LOOKED_AT = 1 << 22  # numbers of a weight that a fault is looked for in


@dataclass(frozen=True)
class Departure:
    """A layer whose product is further from what its weight means than rounding explains.

    Attributes
    ----------
    name
        Of the layer.
    token, output
        The worst place of its result.
    got, want
        What was computed there, and what is exact.
    budget
        How far rounding can bring the two apart.
    wrong, total
        How many numbers are too far off, of how many.
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
class Watching:
    """What the layers of a model have in common.

    Attributes
    ----------
    follows
        Whether a model goes on with what weights mean, or with what kernels compute, which are not compared.
    departures
        Of each layer that departs, by its name: the first one, and what reads its weight back.
    kernels
        In which order each layer is multiplied.
    worst
        How close each layer came: its largest error as a part of what rounding can cost.
    overflown
        The layers whose inputs or results were beyond the range of their type.
    tell
        Called with the bytes of each weight that was compared.
    compares
        Whether kernels are asked at all where `follows` is the meaning.
    """

    follows: Literal["meaning", "kernel"] = "meaning"
    compares: bool = True
    tell: Callable[[int], None] = field(default=lambda size: None)
    departures: dict[str, tuple[Departure, Callable[[], Misread | None]]] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    overflown: dict[str, None] = field(default_factory=dict)

    def compare(self, name: str, x: Tensor, y: Tensor, want: Bounded) -> tuple[int, int, float, int] | None:
        """The worst place of y (T, N), how far off it is, and how many are; None where nothing is wrong."""
        off = excess(y, want)
        largest = torch.finfo(y.dtype).max
        fits = (want.value.abs() + want.error < largest) & x.isfinite().all(-1, keepdim=True)
        if not bool(fits.all()):
            self.overflown[name] = None
        judged = torch.where(fits, off.nan_to_num(torch.inf), 0.0)
        self.worst[name] = max(self.worst.get(name, 0.0), float(judged.max()) if judged.numel() else 0.0)
        wrong = int((judged > 1).sum())
        if not wrong:
            return None
        token, output = divmod(int(judged.argmax()), judged.shape[-1])
        return token, output, float(want.rounded_to(y.dtype).error[token, output]), wrong


class WatchedLinear(nn.Module):
    """A layer (..., K) -> (..., N) of a `watch`.

    Parameters
    ----------
    weight, bias
        What it means: the weight as it was loaded, and (N,) or None.
    kernel
        What multiplies; None: there is only the meaning.
    maximum
        As of `Weight.get_linear`.
    converted
        Whether the kernel's scales were rounded to the type of the activations.
    watch
        That of the model.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        kernel: nn.Module | None,
        maximum: Maximum,
        converted: bool,
        watch: Watching,
    ) -> None:
        super().__init__()
        self.kernel, self.watch, self.meaning, self.maximum = kernel, watch, weight, maximum
        self.converted: bool = converted
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """X (..., K) -> (..., N), in x's dtype."""
        if self.watch.follows == "kernel" and self.kernel is not None:
            y: Tensor = self.kernel(x)
            return y
        rows = x.reshape(-1, x.shape[-1])
        want = self.exact(rows)
        if self.kernel is not None and self.watch.compares:
            self._compare(rows, self.kernel(rows), want)
            self.watch.tell(held(self.meaning))
        return want.value.to(x.dtype).reshape(*x.shape[:-1], -1)

    def exact(self, rows: Tensor) -> Bounded:
        """What rows (T, K) become, and what a kernel may be off by."""
        bias = self._buffers["bias"]
        return bounds.of_linear(rows, self.meaning, bias, "declared", self.maximum, converted=self.converted)

    def _compare(self, rows: Tensor, y: Tensor, want: Bounded) -> None:
        name = self.meaning.layer.name
        found = self.watch.compare(name, rows, y, want)
        if found is None:
            return
        token, output, budget, wrong = found
        place, (n,) = part_of(self.meaning, (output,))
        told = float(y[token, output]), float(want.value[token, output]), budget, wrong, y.numel()
        departure = Departure(place, token, n, *told), partial(self.read_back, rows.dtype)
        self.watch.departures.setdefault(name, departure)

    def read_back(self, dtype: torch.dtype) -> Misread | None:
        """The first number of the weight that one-hot inputs of a `dtype` show to be another one."""
        K, device = self.meaning.layer.K, self.meaning.device
        assert self.kernel is not None
        for start in range(0, K, ONE_HOT):
            rows = torch.eye(min(ONE_HOT, K - start), K, dtype=dtype, device=device).roll(start, 1)
            y, want = self.kernel(rows), self.exact(rows)
            wrong = (~(excess(y, want) <= 1)).nonzero()
            if wrong.numel():
                k, n = wrong[0].tolist()
                read = float(y[k, n]), float(want.value[k, n])
                return part_of(self.meaning, (n, start + k)), *read, self._explained(n, dtype)
        return None

    def _explained(self, n: int, dtype: torch.dtype) -> str | None:
        """The known fault that explains the outputs about `n`, in words; None where none does."""
        N, K = self.meaning.layer.N, self.meaning.layer.K
        size = min(N, max(1, LOOKED_AT // K))
        first = min(n // size * size, N - size)
        assert self.kernel is not None
        got, want = [], []
        for start in range(0, K, ONE_HOT):
            rows = torch.eye(min(ONE_HOT, K - start), K, dtype=dtype, device=self.meaning.device).roll(
                start, 1
            )
            got.append(self.kernel(rows)[:, first : first + size].T)
            want.append(self.exact(rows).value[:, first : first + size].T.float())
        bias = self._buffers["bias"]
        added = None if bias is None else bias[first : first + size]
        return explained(torch.cat(want, 1), torch.cat(got, 1), self.meaning, first, added)


class WatchedExperts(nn.Module):
    """The experts of a layer of a `watch`.

    Parameters
    ----------
    experts
        What they mean: the `ExpertsWeight` as it was loaded.
    repacked
        The same in the order of the kernel.
    kernel
        What multiplies; None: there is only the meaning.
    watch
        That of the model.
    """

    def __init__(self, experts: Any, repacked: Any, kernel: nn.Module | None, watch: Watching) -> None:
        super().__init__()
        self.meaning, self.repacked, self.kernel, self.watch = experts, repacked, kernel, watch

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """What the experts of each token make of x (..., H), in its dtype; ids and weights (T, k)."""
        if self.watch.follows == "kernel" and self.kernel is not None:
            y: Tensor = self.kernel(x, topk_ids, topk_weights)
            return y
        rows = x.reshape(-1, x.shape[-1])
        want = of_experts(rows, topk_ids, topk_weights, self.meaning)
        if self.kernel is not None and self.watch.compares:
            self._compare(rows, topk_ids, self.kernel(rows, topk_ids, topk_weights), want)
            self.watch.tell(held(self.meaning))
        return want.value.to(x.dtype).reshape(x.shape)

    def _compare(self, rows: Tensor, ids: Tensor, y: Tensor, want: Bounded) -> None:
        name = self.meaning.gate_up.layer.name
        found = self.watch.compare(name, rows, y, want)
        if found is None:
            return
        token, output, budget, wrong = found
        told = float(y[token, output]), float(want.value[token, output]), budget, wrong, y.numel()
        departure = Departure(name, token, output, *told), partial(self.read_back, ids[token].tolist())
        self.watch.departures.setdefault(name, departure)

    def read_back(self, chosen: list[int]) -> Misread | None:
        """The first number of a matrix of `chosen` experts that is another one in the order of the kernel."""
        for expert in sorted(set(chosen)):
            place = int(self.meaning.local.map[expert])
            if place < 0:
                continue
            meant, read = self.meaning.expert(place), self.repacked.expert(place)
            for own, other in zip(meant, read, strict=True):
                wants, gots = own.dequantize(), other.dequantize()
                wrong = (gots != wants).nonzero()
                if wrong.numel():
                    n, k = wrong[0].tolist()
                    read = float(gots[n, k]), float(wants[n, k])
                    return part_of(own, (n, k)), *read, explained(wants, gots, own)
        return None


def part_of(weight: Weight, place: tuple[int, ...]) -> Place:
    """The layer that an output of a fused one is of, and the place in it: (n, ...)."""
    names, parts, n = weight.layer.name.split(", "), weight.layer.parts, place[0]
    if len(names) != len(parts):
        return weight.layer.name, place
    for name, width in zip(names, parts, strict=True):
        if n < width:
            return name, (n, *place[1:])
        n -= width
    return weight.layer.name, place


def held(weight: Any) -> int:
    """Bytes of the tensors of a weight, or of the experts of a layer."""
    return sum(tensor.nbytes for tensor in weight.fields().values())


def linears_of(layer: nn.Module) -> Iterator[WatchedLinear]:
    """The watched products that a layer of a model holds, in the order of their outputs."""
    return (module for module in layer.modules() if isinstance(module, WatchedLinear))
