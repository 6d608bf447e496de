"""A kernel whose parameters, once prepared, are the tensors of one typed weight."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError
from qload.formats import GPTQWeight
from qload.kernels import dequantize
from qload.kernels.mp_linear.contract import MPLinearKernel, MPLinearLayerConfig
from qload.kernels.mp_linear.parameters import read_layer
from qload.kernels.mp_linear.reasons import why_not
from qload.spec import Weight


class TypedLinearKernel(MPLinearKernel):
    """Reads tagged parameters as a GPTQ weight, repacks it, and keeps its tensors in the layer."""

    bits: ClassVar[tuple[int, ...]]
    groups: ClassVar[tuple[int, ...] | None] = None  # None: of any size
    act_types: ClassVar[tuple[torch.dtype, ...]]

    _prepared: Weight | None = None

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """(True, None), or (False, why not)."""
        reason = why_not(c, cls.bits, cls.groups, cls.act_types)
        return reason is None, reason

    def repacked(self, weight: GPTQWeight) -> Weight:
        """The layer in the order this kernel reads."""
        return weight

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Parameters -> the tensors of `repacked`, under the parameters' names where they have one."""
        if self._prepared is not None:
            raise ArgumentError(type(self).__name__, "weights to be processed once", "a second time")
        weight = read_layer(self.config, self.w_q_name, *self._get_weight_params(layer))
        typed = self.repacked(weight)
        self._names = {field: self._name(field) for field in typed.fields()}
        for name in {*self._given().values()} - {*self._names.values(), None}:
            self._transform_param(layer, name, _emptied)  # this kernel reads no such tensor
        for field, tensor in typed.fields().items():
            self._transform_param(layer, self._names[field], lambda _, made=tensor: made)  # type: ignore[misc]
        # Without its tensors: they are the layer's, and move with it.
        self._prepared = typed.holding({f: tensor.to("meta") for f, tensor in typed.fields().items()})

    def typed(self, layer: nn.Module) -> Weight:
        """The typed weight over the layer's parameters."""
        if self._prepared is None:
            raise ArgumentError(
                type(self).__name__, "process_weights_after_loading before the first call", "a call"
            )
        return self._prepared.holding({f: getattr(layer, name).data for f, name in self._names.items()})

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K) -> (..., N), in x's dtype; products and sums in float32."""
        return dequantize.linear(x, self.typed(layer), bias)

    def _given(self) -> dict[str, str | None]:
        return {
            "qweight": self.w_q_name,
            "scales": self.w_s_name,
            "qzeros": self.w_zp_name,
            "g_idx": self.w_gidx_name,
        }

    def _name(self, field: str) -> str:
        return self._given().get(field) or field


def _emptied(old: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.int32) if old is None else old.data.new_empty(0)
