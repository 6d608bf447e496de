"""What an engine asks of a quantization: a config read from JSON, and a method for each layer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn


class QuantizeMethodBase(ABC):
    """How one layer holds its weights and multiplies with them.

    An implementer promises that `apply` works once `process_weights_after_loading` has run, and refuses
    before it where it would be wrong.
    """

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: B027
        """Register the parameters of `layer`; none, unless a method says so.

        `args` and `kwargs`: as the sort of layer has them, see `LinearMethodBase`.
        """

    def process_weights_after_loading(self, layer: nn.Module) -> None:  # noqa: B027
        """Turn what was loaded into `layer` into what `apply` reads; nothing, unless a method says so."""

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """The output of `layer`; `args` and `kwargs`: as the sort of layer has them."""


class LinearMethodBase(QuantizeMethodBase):
    """How a linear layer holds its weights and multiplies with them.

    An implementer promises to register parameters whose tags (`input_dim`, `output_dim`, `packed_dim`,
    `packed_factor`) say how a loader has to cut them, and that refuse to pass for weights before they are
    loaded.
    """

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
        """Multiplies x (..., K) -> (..., N), in x's dtype, by the weight of `layer`; `bias` (N,)."""


class QuantizationConfig(ABC):
    """A checkpoint's quantization, and the method of each of its layers.

    An implementer promises that it can be made, and asked, without a GPU.
    """

    @classmethod
    @abstractmethod
    def get_name(cls) -> str:
        """The name under which an engine knows the method."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From a checkpoint's `quantization_config`, given as `config`."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str = "") -> QuantizeMethodBase | None:
        """The method of `layer`, named `prefix`; None for a layer that this quantization is not about."""

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
