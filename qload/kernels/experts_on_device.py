"""Experts of any format in a CUDA graph: the router's choice stays on the device.

`qload.kernels.experts_function` sorts the chosen experts on the host, and a capture forbids that copy. Here
each pair of a token and an expert gathers the tensors of its expert by index. Calls with more pairs than
experts run every expert over all tokens and mask the other rows. Both add the experts of a token in the order
of their numbers.

The host cannot check ids: the result of a token with an invalid id is NaN.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from qload.kernels.declared import Activations, Maximum
from qload.kernels.reference import product
from qload.spec import Weight


def is_capturing(x: Tensor) -> bool:
    """Return whether the current stream of the device of `x` records a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, eq=False)
class DeviceExperts:
    """The experts of a layer, multiplied without the host.

    Attributes
    ----------
    weight
        An `ExpertsWeight`.
    activations, maximum
        Those of `ExpertsWeight.get_linear`.
    narrow
        The dtype of both sides of a product.
    """

    weight: Any
    activations: Activations
    maximum: Maximum
    narrow: torch.dtype

    def multiply(self, rows: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Rows (T, H) through experts `topk_ids` (T, k) -> (T, H) in the dtype of `topk_weights` (T, k)."""
        local = self.weight.local
        unknown = ((topk_ids < 0) | (topk_ids >= local.total)).any(1, keepdim=True)
        total = torch.zeros(rows.shape, dtype=topk_weights.dtype, device=rows.device)
        total = total.masked_fill(unknown, math.nan)
        if topk_ids.numel() <= len(local):
            return self._add_pairs(total, rows, topk_ids, topk_weights)
        return self._add_experts(total, rows, topk_ids, topk_weights)

    def _add_pairs(self, total: Tensor, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        local = self.weight.local
        ids, order = ids.sort(dim=1, stable=True)
        weights = weights.gather(1, order)
        here = (ids >= local.start) & (ids < local.stop)
        places = (ids - local.start).clamp(0, len(local) - 1)
        for token in range(rows.shape[0]):
            row = slice(token, token + 1)
            for slot in range(ids.shape[1]):
                column = slice(slot, slot + 1)
                y = self._through(rows[row], places[token, column], weights[row, column])
                total[row] += y.masked_fill(~here[row, column], 0.0)
        return total

    def _add_experts(self, total: Tensor, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        local = self.weight.local
        for place in range(len(local)):
            chosen = ids == local.start + place
            routing = weights.masked_fill(~chosen, 0.0).sum(1, keepdim=True)
            y = self._through(rows, place, routing)
            total += y.masked_fill(~chosen.any(1, keepdim=True), 0.0)
        return total

    def _through(self, rows: Tensor, place: Tensor | int, routing: Tensor) -> Tensor:
        """Rows (n, H) through one expert, times the routing weights `own` (n, 1)."""
        facts = self.weight.facts
        taken = rows * routing if facts.side == "input" else rows
        between = facts.activation(*self._product("gate_up", taken, place).chunk(2, dim=-1))
        y = self._product("down", between, place)
        return y if facts.side == "input" else y * routing

    def _product(self, name: Literal["gate_up", "down"], rows: Tensor, place: Tensor | int) -> Tensor:
        stack, biases = getattr(self.weight, name), getattr(self.weight, f"{name}_bias")
        bias = None if biases is None else _entry(biases, place)
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return product(wide, _expert(stack, place), bias, self.activations, self.maximum, self.narrow)


def _expert(stack: Any, place: Tensor | int) -> Weight:
    """The typed weight (N, K) of the expert at `place`, a number or a tensor (1,) on the device."""
    if isinstance(place, int):
        weight: Weight = stack.expert(place)
        return weight
    tensors = {field: _entry(tensor, place) for field, tensor in stack.tensors.items()}
    made: Weight = stack.weight_type.unchecked(stack.config, stack.layer, tensors)
    return made


def _entry(tensor: Tensor, place: Tensor | int) -> Tensor:
    """Entry `place` of a stack (E, ...); floats of 8 bits are gathered as bytes."""
    if isinstance(place, int):
        return tensor[place]
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).index_select(0, place)[0].view(tensor.dtype)
    return tensor.index_select(0, place)[0]
