"""The routed experts of a layer as vLLM asks for them: shared out by tensor or by whole experts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from qload.detect import Target
from qload.engines.vllm.expert_arrivals import ExpertArrivals
from qload.engines.vllm.expert_filling import (
    facts_of,
    finish_experts,
    routed,
    unwatch_experts,
    watch_experts,
)
from qload.engines.vllm.names import CheckpointNames
from qload.kernels.declared import Activations
from qload.loader import ConfiguredFormat
from qload.loader.finite_scales import Nonfinite
from qload.parallel import Rank


class QloadExpertsMethod(FusedMoEMethodBase):
    """What vLLM asks of quantized experts.

    Parameters
    ----------
    moe
        vLLM's config of the layer.
    formats
        What the experts may be stored as.
    names
        The tensors that the checkpoint has.
    target, activations, nonfinite, logged
        As of `TypedLinearMethod`.
    """

    def __init__(
        self,
        moe: Any,
        formats: Sequence[ConfiguredFormat],
        names: CheckpointNames,
        *,
        target: Target | None,
        activations: Activations,
        nonfinite: Nonfinite,
        logged: set[str],
    ) -> None:
        super().__init__(moe)
        self.formats, self.names = formats, names
        self.target, self.activations, self.nonfinite = target, activations, nonfinite
        self.logged = logged

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: `layer` is for none of vLLM's own kernels."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register a parameter for every tensor that an expert of `layer` may have.

        CutError or DivideError, the same on every rank, where the format cannot be cut so; ArgumentError for
        experts that do what qload has no product for.
        """
        layer.expert_facts, layer.params_dtype = facts_of(layer), params_dtype
        parallel = layer.moe_config.moe_parallel_config
        sizes, group = (
            (hidden_size, intermediate_size_per_partition),
            Rank(parallel.tp_rank, parallel.tp_size),
        )
        arrivals = ExpertArrivals(layer.layer_name, self.formats, sizes, group, params_dtype)
        layer.expert_arrivals = arrivals
        watch_experts(layer, arrivals, self.names, lambda: self._finish(layer))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Finish `layer`, where its last tensor has not done so; what is missing is an error of qload."""
        self._finish(layer)
        unwatch_experts(layer)

    def _finish(self, layer: Any) -> None:
        finish_experts(
            layer, layer.expert_arrivals, self.target, self.activations, self.nonfinite, self.logged
        )

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """What the experts of `layer` here make of x (T, H), in its dtype; vLLM sums over the ranks.

        `topk_weights`, `topk_ids`: (T, k). vLLM runs `shared_experts` on `shared_experts_input` itself.
        """
        return routed(layer, x, topk_weights, topk_ids)
