"""A linear layer of vLLM's, filled by its loader, and cut, joined, repacked and multiplied by qload.

vLLM hands over whole tensors of the checkpoint, and of each a rank keeps its share. When the last of a layer
is there, the layer is repacked and lets go of what arrived: at no time is there more than the model, and one
layer twice. Where the files are not known, all layers are finished after the last tensor.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase

from qload.engines.vllm.filling import finish, multiplied, watch
from qload.engines.vllm.names import CheckpointNames
from qload.methods import TypedLinearMethod


class QloadLinearMethod(LinearMethodBase):
    """What vLLM asks of a quantized linear layer.

    Parameters
    ----------
    typed
        The method that registers and cuts.
    names
        The tensors that the checkpoint has.
    """

    def __init__(self, typed: TypedLinearMethod, names: CheckpointNames) -> None:
        super().__init__()
        self.typed, self.names = typed, names

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
        """Register a parameter for every tensor that `layer` may have, as `TypedLinearMethod` does."""
        extra_weight_attrs.pop("weight_loader", None)  # vLLM's cuts by tags, ours by the formats
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        self.typed.create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)
        watch(layer, self.typed, self.names)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Finish `layer`, where its last tensor has not done so; what is missing is an error of qload."""
        finish(layer, self.typed)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies x (..., K) -> (..., N) of this rank, in x's dtype, by `layer`'s weight; `bias` (N,)."""
        return multiplied(layer, x, bias)
