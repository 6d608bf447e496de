"""From the tensors that vLLM's loaders bring to a layer that multiplies: when, and what is let go of."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qload.engines.vllm.names import Awaited, CheckpointNames
from qload.methods import TypedLinearMethod
from qload.spec import named

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
    arrivals = layer.typed_arrivals
    arrived = [getattr(layer, slot.param_name) for slot in arrivals.slots.values()]
    device, linear = arrived[0].device, typed.loaded(layer, rows)
    for slot, param in zip(arrivals.slots.values(), arrived, strict=True):
        delattr(layer, slot.param_name)
        param.data = param.data.new_empty(0)
    arrivals.close()
    layer.typed_linear = linear
    # vLLM's latent attention asks for a weight by this name to learn its device, and multiplies to read it.
    layer.qweight = torch.empty(0, device=device)


def multiplied(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """X (..., K) -> this rank's (..., N), in x's dtype; `bias` (N,) goes into the products."""
    linear = layer.typed_linear
    y: Tensor = linear(x) if bias is None else linear(x, bias)
    return y


def padded(y: Tensor, bias: Tensor | None, size: int) -> Tensor:
    """Logits (..., rows that a rank has) -> (..., size), 0 for rows that pad a vocabulary, plus `bias`."""
    y = functional.pad(y, (0, size - y.shape[-1]))
    return y if bias is None else y + bias


def _rest(name: str, module: str) -> str:
    return name.removeprefix(f"{module}.")
