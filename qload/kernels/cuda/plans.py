"""Which launch multiplies how many tokens of a layer, decided once for all layers that are alike.

`cuda.linear` decides anew on every call. A `LinearPlan` decides when a number of tokens is first seen, by the
same table, checks and kernels, and then a call is: memory for y, pointers, one routine of the module.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernel_formats.strips import StripsWeight
from qload.kernels.cuda import marlin
from qload.kernels.cuda.choice import choose
from qload.kernels.cuda.launch import ALIGNED, Launch
from qload.kernels.cuda.linear import OPERATORS, why_not_linear
from qload.kernels.cuda.module import current_device, empty_rows, raw_stream
from qload.spec import Weight

PLANNED = (StripsWeight, GPTQMarlinWeight)
MOST_PLANS = 1 << 14  # numbers of tokens that are remembered
BETWEEN = ALIGNED - 1  # bits of an address that is between two loads


class LinearPlan:
    """How x of one dtype, on one device, is multiplied with layers like `weight`, whose inputs lie in order.

    Nothing of the weight is kept but its shape and type: a call is given where its tensors lie.
    """

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, weight.device
        self.index = weight.device.index
        self.N, self.K = weight.shape
        self._operator = OPERATORS[type(weight)]
        names = list(weight.fields())
        self._places = tuple(names.index(name) for name in ("qweight", "scales", "qzeros") if name in names)
        self._has_zeros = len(self._places) > 2
        self._capability = torch.cuda.get_device_capability(weight.device)
        self._made: dict[
            int, Launch | None
        ] = {}  # by tokens; None: those that have more to do than to launch

    def multiply(
        self, x: Tensor, held: Sequence[Tensor], pointers: Sequence[int], bias: Tensor | None, weight: Any
    ) -> Tensor | None:
        """y (..., N), or None where `cuda.linear` has to see to it.

        x: of this plan's dtype and device, plain. `held`, which lie at `pointers`, and `bias` fit the layer.
        `weight(held)` makes a typed weight of them.
        """
        shape, K = x.shape, self.K
        if not shape or shape[-1] != K:
            return None
        tokens = shape.numel() // K if K else 0
        launch = self._made[tokens] if tokens in self._made else self._decide(x, tokens, weight(held), bias)
        if launch is None:
            return None
        if current_device() == self.index:
            return self._start(launch, x, tokens, pointers, bias)
        with torch.cuda.device(self.index):
            return self._start(launch, x, tokens, pointers, bias)

    def _start(
        self, launch: Launch, x: Tensor, tokens: int, pointers: Sequence[int], bias: Tensor | None
    ) -> Tensor | None:
        whole = x if x.is_contiguous() else x.contiguous()
        at, codes, scales = whole.data_ptr(), pointers[self._places[0]], pointers[self._places[1]]
        zeros = pointers[self._places[2]] if self._has_zeros else 0
        if (at | codes | scales | zeros) & BETWEEN:
            return None
        flat = x.ndim == 2  # as most are
        y = empty_rows(x, tokens, self.N) if flat else x.new_empty((*x.shape[:-1], self.N))
        parts = x.new_empty(launch.scratch, dtype=torch.float32) if launch.scratch else None
        launch.start(
            at, codes, scales, zeros, 0, 0 if parts is None else parts.data_ptr(),
            0 if bias is None else bias.data_ptr(), y.data_ptr(), raw_stream(self.index),
        )  # fmt: skip
        return y

    def _decide(self, x: Tensor, tokens: int, weight: Weight, bias: Tensor | None) -> Launch | None:
        found: Launch | None = None
        if tokens and self.N:
            operator = self._operator
            rows = x.reshape(-1, self.K).contiguous()
            call: Any = operator.call(*marlin.arguments(rows, weight, bias))  # type: ignore[arg-type]
            marlin.check(call)
            chosen = choose(operator.kernels, call, layout=call.layout, capability=self._capability)
            found = None if chosen.prepare is None else chosen.prepare(call, rows)
        if len(self._made) >= MOST_PLANS:
            self._made.clear()
        self._made[tokens] = found
        return found


def plan_of(weight: Weight, dtype: torch.dtype) -> LinearPlan | None:
    """The plan of a layer and a dtype of activations, or None where none is to be had."""
    if type(weight) not in PLANNED or why_not_linear(weight, dtype) is not None or raw_stream is None:
        return None
    whole = weight.config.is_k_full and "perm" not in weight.fields() and weight.layer.K % 8 == 0
    return LinearPlan(weight, dtype) if whole else None
