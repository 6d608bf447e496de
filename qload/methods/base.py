"""What an engine asks of a quantization: a config read from JSON, and a method for each layer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn


class QuantizeMethodBase(ABC):
    """How one layer holds its weights and multiplies with them."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: B027
        """Register the layer's parameters; none, unless a method says so."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:  # noqa: B027
        """Turn what was loaded into what `apply` reads; nothing, unless a method says so."""

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output."""


class LinearMethodBase(QuantizeMethodBase):
    """How a linear layer holds its weights and multiplies with them."""

    @abstractmethod
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
        """Register the parameters of this rank's share of a layer.

        Parameters
        ----------
        layer
            The module that gets them.
        input_size_per_partition
            This rank's inputs.
        output_partition_sizes
            This rank's outputs of each part of a fused layer.
        input_size
            The whole layer's inputs.
        output_size
            The whole layer's outputs.
        params_dtype
            Of the parameters that hold plain numbers.
        extra_weight_attrs
            Set on every parameter, `weight_loader` first of all.
        """

    @abstractmethod
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K) -> (..., N), in x's dtype; `bias` (N,)."""


class QuantizationConfig(ABC):
    """A checkpoint's quantization, and the method of each of its layers."""

    @classmethod
    @abstractmethod
    def get_name(cls) -> str:
        """The name under which an engine knows the method."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From a checkpoint's `quantization_config`."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str = "") -> QuantizeMethodBase | None:
        """The method of the layer named `prefix`; None for a layer that this quantization is not about."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """The dtypes that activations may have."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The lowest compute capability of a CUDA device, times 10; 0: any device."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Files beside the weights in which the config may stand."""
        return ["quantize_config.json"]
