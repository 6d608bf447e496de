"""Linear layers left as they are."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qload.methods.base import LinearMethodBase
from qload.methods.parameters import blank_floats, check_loaded, full_name, load_whole, set_weight_attrs


class UnquantizedLinearMethod(LinearMethodBase):
    """One parameter, `weight` (N, K) in `params_dtype`."""

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
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, "input_dim_whole": input_size})
        loader = partial(load_whole, tensor=full_name(layer, "weight"))
        set_weight_attrs(weight, {"weight_loader": loader, **extra_weight_attrs})

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Refuse a layer that was not loaded."""
        check_loaded(layer, "weight")

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K) -> (..., N)."""
        weight: Tensor = layer.weight  # type: ignore[assignment]
        return nn.functional.linear(x, weight, bias)
