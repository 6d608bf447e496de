"""A kernel whose parameters, once prepared, are the tensors of one typed weight."""

from typing import ClassVar, NoReturn

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, DtypeError, ShapeError
from qload.formats import GPTQWeight
from qload.kernels import dtypes
from qload.kernels.linear import LinearCall
from qload.kernels.mp_linear.contract import MPLinearKernel, MPLinearLayerConfig
from qload.kernels.mp_linear.owners import check_unowned, free_name, is_prepared, own
from qload.kernels.mp_linear.parameters import read_layer
from qload.kernels.mp_linear.reasons import why_not
from qload.spec import Weight

OTHERWISE = "another kernel, which scales in float32: DequantizeLinearKernel"


class TypedLinearKernel(MPLinearKernel):
    """Reads tagged parameters as a GPTQ weight, repacks it, and keeps its tensors in the layer."""

    bits: ClassVar[tuple[int, ...]]
    groups: ClassVar[tuple[int, ...] | None] = None  # None: of any size
    act_types: ClassVar[tuple[torch.dtype, ...]]

    _prepared: LinearCall | None = None

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """(True, None), or (False, why not)."""
        reason = why_not(c, cls.bits, cls.groups, cls.act_types)
        return reason is None, reason

    def repacked(self, weight: GPTQWeight) -> Weight:
        """The `weight` in the order this kernel reads."""
        return weight

    def check_range(self, weight: GPTQWeight) -> None:
        """CastError where what `weight` means is not in the range of the dtype that is multiplied in."""
        dtypes.check_range(weight, self.config.act_type, self.w_q_name, OTHERWISE)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Parameters -> the tensors of `repacked`, under the parameters' names where they have one.

        ArgumentError where it was done before, or a parameter belongs to another weight.
        """
        if self._prepared is not None:
            raise ArgumentError(type(self).__name__, "weights to be processed once", "a second time")
        given = self._given()
        check_unowned(layer, given.values())
        weight = read_layer(self.config, self.w_q_name, *self._get_weight_params(layer))
        typed = dtypes.for_activations(self.repacked(weight), self._scales_for(), OTHERWISE)
        names = {f: given.get(f) or free_name(layer, self.w_q_name, f) for f in typed.fields()}
        unread = [name for name in given.values() if name is not None and name not in names.values()]
        for name in unread:
            self._transform_param(layer, name, _emptied)  # this kernel reads no such tensor
        for field, tensor in typed.fields().items():
            self._transform_param(layer, names[field], lambda _, made=tensor: made)  # type: ignore[misc]
        own(layer, self.w_q_name, [*names.values(), *unread])
        self._names = tuple(names.values())
        self._made = tuple((tensor.dtype, tensor.shape) for tensor in typed.fields().values())
        self._prepared = LinearCall(typed)

    def typed(self, layer: nn.Module) -> Weight:
        """The typed weight over the parameters of `layer`, which were moved at the most since.

        ArgumentError before they are processed; DtypeError or ShapeError where they were cast or replaced.
        """
        return self._ready(layer).typed(self._tensors(layer))

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies x (..., K) -> (..., N), in x's dtype; sums in float32."""
        return self._ready(layer)(x, self._tensors(layer), bias)

    def _ready(self, layer: nn.Module) -> LinearCall:
        if self._prepared is None or not is_prepared(layer, self.w_q_name):
            raise ArgumentError(
                type(self).__name__, "process_weights_after_loading before the first call", "a call"
            )
        return self._prepared

    def _tensors(self, layer: nn.Module) -> list[Tensor]:
        """Those of the layer, which nobody cast or replaced by others of another shape."""
        own, names = layer._parameters, self._names
        held = [own.get(name) for name in names]
        found = [self._held(layer, name) if t is None else t for t, name in zip(held, names, strict=True)]
        for tensor, name, (dtype, shape) in zip(found, names, self._made, strict=True):
            if tensor.dtype != dtype or tensor.shape != shape:
                _say_changed(name, tensor, dtype, shape)
        return found

    def _scales_for(self) -> torch.dtype | None:
        """The type that scales are converted to, once; None: they stay."""
        return self.config.act_type if self.config.act_type in dtypes.DTYPES else None

    def _given(self) -> dict[str, str | None]:
        return {
            "qweight": self.w_q_name,
            "scales": self.w_s_name,
            "qzeros": self.w_zp_name,
            "g_idx": self.w_gidx_name,
        }


def _emptied(old: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.int32) if old is None else old.data.new_empty(0)


def _say_changed(name: str, now: Tensor, dtype: torch.dtype, shape: torch.Size) -> NoReturn:
    if now.dtype != dtype:
        was, got = (str(each).removeprefix("torch.") for each in (dtype, now.dtype))
        raise DtypeError(name, [was], got, hint="remedy   move a prepared layer, but do not cast it")
    raise ShapeError(name, f"{tuple(shape)}, as it was prepared", tuple(now.shape))
