"""Linear layers left as they are."""

from typing import Any

import torch
from torch import Tensor, nn

from qload.errors import DtypeError, ShapeError
from qload.methods.base import LinearMethodBase
from qload.methods.parameters import blank_floats, check_loaded, full_name, register_weight


class UnquantizedLinearMethod(LinearMethodBase):
    """A linear layer left as it is: one parameter, `weight` (N, K) in `params_dtype`."""

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
        """Register `weight`, NaN until it is loaded."""
        weight = blank_floats(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        tags = {"input_dim": 1, "output_dim": 0, "input_dim_whole": input_size}
        register_weight(layer, "weight", weight, tags, extra_weight_attrs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Refuse a `layer` that was not loaded: MismatchError."""
        check_loaded(layer, "weight")

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies x (..., K) -> (..., N), both in the dtype of the weight of `layer`; `bias` (N,).

        DtypeError for x in another dtype, ShapeError for x or a bias of another size.
        """
        weight: Tensor = layer.weight  # type: ignore[assignment]
        name, (N, K) = full_name(layer, "weight"), weight.shape
        if x.dtype != weight.dtype:
            known, got = (str(tensor.dtype).removeprefix("torch.") for tensor in (weight, x))
            raise DtypeError(f"{name}: x", [known], got)
        if x.ndim == 0 or x.shape[-1] != K:
            raise ShapeError(f"{name}: x", f"(..., {K}) = (..., K)", tuple(x.shape))
        if bias is not None and tuple(bias.shape) != (N,):
            raise ShapeError(full_name(layer, "bias"), f"({N},) = (N,)", tuple(bias.shape))
        return nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
