"""Layers that are loaded: each class of layer as what `Weights` reads for this rank, in any format.

    layer = ColumnParallelLinear.load(weights, "model.layers.0.mlp.up_proj")
    y = layer(x)

Parts of a fused layer that are not stored alike become several products, whose outputs are joined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, CutError, MismatchError
from qload.kernels.declared import Maximum
from qload.kernels.dtypes import DTYPES
from qload.loader import LayerDescription, LoadPlan, Part, Split
from qload.loader.description import check_alike
from qload.methods.base import LinearMethodBase
from qload.methods.biases import check_biases, read_bias
from qload.parallel import ProcessGroup, ReducingGroup, maximum_over
from qload.parallel.process_group import torch_group
from qload.spec import Layer, Weight
from qload.weights import Weights
from qload.weights.heads import check_heads

LinearFactory = Callable[[Weight, Tensor | None, Maximum], nn.Module]


class LoadedLinearMethod(LinearMethodBase):
    """Of a layer whose weights were loaded with it: `layer.typed_linear` multiplies, and adds the bias."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """ArgumentError: there is nothing to create."""
        raise ArgumentError("quant_method", "one for a layer that is not loaded yet", type(self).__name__)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """X (..., K) -> (..., N), in x's dtype, by the weight of `layer`; `bias` (N,) or its own."""
        linear: nn.Module = layer.typed_linear  # type: ignore[assignment]
        y: Tensor = linear(x) if bias is None else linear(x, bias)
        return y


class JoinedLinear(nn.Module):
    """Layers of the same inputs, whose outputs stand one after another.

    Parameters
    ----------
    linears
        Modules (..., K) -> (..., N), in order.
    widths
        N of each, which a bias of all of them is split by.
    """

    def __init__(self, linears: Sequence[nn.Module], widths: Sequence[int] = ()) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)
        self.widths = tuple(widths)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """All outputs of x (..., K); `bias` (N of all,) goes into the products."""
        if bias is None:
            return torch.cat([linear(x) for linear in self.linears], -1)
        own = zip(self.linears, torch.split(bias, list(self.widths)), strict=True)
        return torch.cat([linear(x, piece) for linear, piece in own], -1)


@dataclass(frozen=True)
class LoadedLinear:
    """What was loaded for a layer.

    Attributes
    ----------
    linear
        The module that multiplies.
    shape
        (N, K) of this rank's share.
    whole
        (N, K) of the whole layer.
    parts
        This rank's outputs of each part.
    """

    linear: nn.Module
    shape: tuple[int, int]
    whole: tuple[int, int]
    parts: tuple[int, ...]


def load_linear(
    weights: Weights, parts: Sequence[Part], split: Split | None, make: LinearFactory | None
) -> LoadedLinear:
    """The `parts` of a layer as a module, their biases cut as they are.

    All is described, and all biases are looked at, before a weight is read; the errors of a load.
    """
    biased = check_biases(weights, parts)
    plans = [each for run in _alike(weights, parts) for each in planned(weights, run, split)]
    loaded: list[tuple[Weight, Tensor | None]] = []
    for run, plan in plans:
        weight = plan.finish(weights)
        loaded.append((weight, read_bias(weights, run, weight, split) if biased else None))
    return made_linear(weights, loaded, make)


def planned(weights: Weights, run: list[Part], split: Split | None) -> list[tuple[list[Part], LoadPlan]]:
    """How to load a `run` of parts of `weights`, cut along `split`.

    Joined, or one by one where one ends inside of a block of its scales; the errors of a load, before a
    weight is read.
    """
    try:
        return [(run, weights.loader.plan(weights, run, split))]
    except CutError:
        if len(run) == 1:
            raise
        return [([part], weights.loader.plan(weights, [part], split)) for part in run]


def made_linear(
    weights: Weights, loaded: Sequence[tuple[Weight, Tensor | None]], make: LinearFactory | None
) -> LoadedLinear:
    """Weights of the same inputs, each with its bias, as one module."""
    make, group = make or _maker(weights), weights.process_group
    linears = [make(weight, bias, maximum_for(weight.layer, group)) for weight, bias in loaded]
    layers = [weight.layer for weight, _ in loaded]
    widths = tuple(width for layer in layers for width in layer.parts)
    return LoadedLinear(
        linears[0] if len(linears) == 1 else JoinedLinear(linears, [layer.N for layer in layers]),
        (sum(widths), layers[0].K),
        (sum(layer.whole[0] for layer in layers), layers[0].whole[1]),
        widths,
    )


def equal_parts(weights: Weights, prefixes: Sequence[str]) -> list[Part]:
    """Layers of which each rank has an equal share; DivideError where that would end inside of a head."""
    check_heads(weights, prefixes)
    return [Part(prefix) for prefix in prefixes]


def _alike(weights: Weights, parts: Sequence[Part]) -> list[list[Part]]:
    """Neighbours that are stored, and will be loaded, alike; MismatchError for layers of other inputs."""
    if len({part.prefix for part in parts}) == 1:
        return [list(parts)]
    runs: list[list[Part]] = []
    last: LayerDescription | None = None
    for part in parts:
        layer = weights.loader.describe(weights, part.prefix)
        if last is not None and layer.K != last.K:
            check_alike([last, layer])
        if last is not None and _is_alike(weights, last, layer):
            runs[-1].append(part)
        else:
            runs.append([part])
        last = layer
    return runs


def _is_alike(weights: Weights, first: LayerDescription, other: LayerDescription) -> bool:
    try:
        check_alike([first, other])
    except MismatchError:
        return False
    loader, device = weights.loader, weights.device
    return loader.made(first, device) == loader.made(other, device)


def _maker(weights: Weights) -> LinearFactory:
    """The module that a weight makes by itself, for activations of the type that was asked for."""
    dtype = weights.dtype if weights.dtype in DTYPES else None
    return lambda weight, bias, maximum: weight.get_linear(bias, maximum=maximum, dtype=dtype)


def maximum_for(layer: Layer, group: ProcessGroup) -> Maximum:
    """What finds the largest of all ranks' inputs, where a layer has some of them and one scale is of all.

    None too where the group cannot reduce: the layer itself says then what it needs.
    """
    scheme = layer.activations
    if scheme is None or not scheme.finds_maxima or layer.whole[1] == layer.K:
        return None
    reduces = isinstance(group, ReducingGroup) or torch_group(group) is not None
    return maximum_over(group) if reduces else None
