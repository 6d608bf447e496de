"""From the tensors that vLLM's loaders bring to a layer that multiplies: when, and what is let go of."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qload.detect import for_target
from qload.engines.vllm.names import Awaited, CheckpointNames
from qload.errors import ArgumentError
from qload.kernels.declared import Maximum
from qload.kernels.dtypes import DTYPES
from qload.loader import FormatLoader, Part
from qload.methods import JoinedLinear, TypedLinearMethod
from qload.methods.loaded import load_linear
from qload.methods.typed_linear import repacked_alone
from qload.parallel import ALONE
from qload.spec import Weight, named
from qload.weights import Weights

Rows = tuple[int, int]


def watch(
    layer: nn.Module, typed: TypedLinearMethod, names: CheckpointNames, rows: Rows | None = None
) -> None:
    """Finish a layer when the last of the tensors that the checkpoint has of it was loaded."""
    arrivals: Any = layer.typed_arrivals
    place, slots = arrivals.place, arrivals.slots
    modules = {place.prefix, *place.names}
    wanted = {name for module in modules for name in names.of([module]) if _rest(name, module) in slots}
    watched = _Watched(layer, typed, rows, Awaited(wanted))
    for suffix, slot in slots.items():
        param: Any = getattr(layer, slot.param_name)
        param.weight_loader = partial(watched.load, suffix, param.weight_loader)


class _Watched:
    """A layer that is finished by its last tensor."""

    def __init__(
        self, layer: nn.Module, typed: TypedLinearMethod, rows: Rows | None, awaited: Awaited
    ) -> None:
        self.layer, self.typed, self.rows, self.awaited = layer, typed, rows, awaited

    def load(
        self,
        suffix: str,
        loader: Callable[..., None],
        param: nn.Parameter,
        loaded_weight: Tensor,
        shard_id: int | str | None = None,
    ) -> None:
        """What vLLM's loaders call with a whole tensor, and the id of its part where layers are merged."""
        loader(param, loaded_weight, shard_id)
        place: Any = self.layer.typed_arrivals.place  # type: ignore[union-attr]
        fused = len(place.parts) > 1 and shard_id is None
        number = 0 if shard_id is None else place.part(shard_id, suffix)
        if self.awaited.are_all_there(named(place.prefix if fused else place.names[number], suffix)):
            finish(self.layer, self.typed, self.rows)


def finish(layer: Any, typed: TypedLinearMethod, rows: Rows | None = None) -> None:
    """Make what multiplies, and let go of what arrived, which vLLM's loaders may still refer to.

    Parts of a merged layer that are not stored alike are multiplied one after another. `rows`: which of all
    this rank has, where its share is no equal one. A second call does nothing.
    """
    if hasattr(layer, "typed_linear"):
        return
    arrivals, stored = layer.typed_arrivals, FormatLoader(*typed.formats)
    place, slots = arrivals.place, arrivals.slots.values()
    arrived = [getattr(layer, slot.param_name) for slot in slots]
    dtype = layer.params_dtype if layer.params_dtype in DTYPES else None
    device, group = arrived[0].device, place.group if rows is None else ALONE
    loader = for_target(stored, typed.target)
    weights = Weights(arrivals, loader=loader, device=device, dtype=layer.params_dtype, process_group=group)
    shape = weights.loader.shape
    if rows is not None:
        parts = [Part(place.prefix, *rows)]
    elif arrivals.is_fused(place.prefix):
        parts = place.load_of_whole(shape(weights, place.prefix))
    else:
        parts = place.load_of_parts([shape(weights, name) for name in place.names])

    def make(weight: Weight, bias: Tensor | None, maximum: Maximum) -> nn.Module:
        own: Maximum = "own" if place.split == "K" else None
        return weight.get_linear(bias, activations=typed.activations, maximum=own, dtype=dtype)

    split = None if rows is not None else place.split
    try:
        loaded = load_linear(weights, parts, split, make)
    except ArgumentError:
        if not arrivals.is_share:
            raise
        alone = Weights(arrivals, loader=stored, device=device, dtype=layer.params_dtype, process_group=group)

        def make_alone(weight: Weight, bias: Tensor | None, maximum: Maximum) -> nn.Module:
            return make(repacked_alone(weight, alone, parts, typed.target), bias, maximum)

        loaded = load_linear(alone, parts, split, make_alone)
    for slot, param in zip(slots, arrived, strict=True):
        delattr(layer, slot.param_name)
        param.data = param.data.new_empty(0)
    arrivals.close()
    layer.typed_linear = loaded.linear
    if isinstance(loaded.linear, JoinedLinear):
        linears: Any = loaded.linear.linears
        layer.joined_sizes = [each.typed.layer.N for each in linears]
    # vLLM's latent attention asks for a weight by this name to learn its device, and multiplies to read it.
    layer.qweight = torch.empty(0, device=device)


def multiplied(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """X (..., K) -> this rank's (..., N), in x's dtype; `bias` (N,) goes into the products."""
    linear = layer.typed_linear
    if bias is None:
        y: Tensor = linear(x)
    elif isinstance(linear, JoinedLinear):
        own = zip(linear.linears, torch.split(bias, layer.joined_sizes), strict=True)
        y = torch.cat([each(x, piece) for each, piece in own], -1)
    else:
        y = linear(x, bias)
    return y


def padded(y: Tensor, bias: Tensor | None, size: int) -> Tensor:
    """Logits (..., rows that a rank has) -> (..., size), 0 for rows that pad a vocabulary, plus `bias`."""
    y = functional.pad(y, (0, size - y.shape[-1]))
    return y if bias is None else y + bias


def _rest(name: str, module: str) -> str:
    return name.removeprefix(f"{module}.")
