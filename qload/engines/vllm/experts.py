"""The routed experts of a layer of vLLM's, which `ExpertsWeight.get_linear` multiplies by.

vLLM shares experts by tensor or by whole experts, and puts its own numbers to those of a rank; the experts
that arrive here are numbered as vLLM does, and chosen ones of other ranks contribute 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from qload.detect import Target, for_target
from qload.engines.vllm.expert_arrivals import MATRICES, ExpertArrivals
from qload.engines.vllm.names import Awaited, CheckpointNames
from qload.errors import ArgumentError, MismatchError
from qload.experts import ExpertFacts, GatedActivation, LocalExperts
from qload.kernels.declared import Activations
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.weights import Weights

PARAMETERS = {"w13": ("w1", "w3"), "w2": ("w2",)}  # vLLM's names of an expert's parameters begin so
ACTIVATIONS: Mapping[str, GatedActivation] = {
    "silu": GatedActivation("silu"),
    "gelu": GatedActivation("gelu"),
    "gelu_tanh": GatedActivation("gelu_tanh"),
}


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
    target, activations
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
    ) -> None:
        super().__init__(moe)
        self.formats, self.names = formats, names
        self.target, self.activations = target, activations

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
        """Register a parameter for every tensor that an expert of `layer` may have, through which all come.

        CutError or DivideError, the same on every rank, where the format cannot be cut so; ArgumentError for
        experts that do what qload has no product for.
        """
        layer.expert_facts = facts_of(layer)
        parallel = layer.moe_config.moe_parallel_config
        sizes, group = (hidden_size, intermediate_size_per_partition), Rank(parallel.tp_rank, parallel.tp_size)
        arrivals = ExpertArrivals(layer.layer_name, self.formats, sizes, group, params_dtype)
        awaited = Awaited(self._wanted(layer, arrivals))
        layer.expert_arrivals, layer.params_dtype = arrivals, params_dtype
        for lead, shards in PARAMETERS.items():
            for suffix, slot in arrivals.slots[shards[0]].items():
                param: Any = nn.Parameter(torch.empty(0, dtype=slot.dtype), requires_grad=False)
                param.weight_loader = partial(self._load, layer, awaited, suffix)
                layer.register_parameter(f"{lead}_{slot.param_name}", param)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Finish `layer`, where its last tensor has not done so; what is missing is an error of qload."""
        if hasattr(layer, "typed_experts"):
            return
        arrivals: ExpertArrivals = layer.expert_arrivals
        loader = for_target(FormatLoader(*self.formats), self.target)
        device = next(layer.parameters()).device
        options: dict[str, Any] = {"device": device, "dtype": layer.params_dtype, "process_group": arrivals.group}
        split = "tensor" if arrivals.group.size() > 1 else None
        weights = Weights(arrivals, loader=loader, **options)
        made = weights.get_experts(arrivals.prefix, split=split, facts=layer.expert_facts)
        count = layer.local_num_experts  # and one more, which is on no rank, for all that are elsewhere
        if len(made.local) != count:
            raise MismatchError(arrivals.prefix, "not all loaded", f"{count} experts", str(len(made.local)))
        made = replace(made, local=LocalExperts(0, count, count + 1))
        linear = made.get_linear(activations=self.activations, maximum="own" if split else None)
        for name, param in list(layer.named_parameters(recurse=False)):
            if name.partition("_")[0] in PARAMETERS:
                delattr(layer, name)
                param.data = param.data.new_empty(0)
        arrivals.close()
        layer.typed_experts, layer.experts_elsewhere = linear, count

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

        `topk_ids`, `topk_weights`: (T, k), numbers of the whole layer's experts. vLLM runs `shared_experts`
        on `shared_experts_input` itself.
        """
        if layer.expert_map is not None:
            here = layer.expert_map[topk_ids.long()]
            topk_ids = torch.where(here < 0, layer.experts_elsewhere, here)
        y: Tensor = layer.typed_experts(x, topk_ids.long(), topk_weights)
        return y

    def _wanted(self, layer: Any, arrivals: ExpertArrivals) -> set[str]:
        """vLLM's names of all tensors of the experts that are here."""
        shards = {layer.ckpt_gate_proj_name: "w1", layer.ckpt_up_proj_name: "w3", layer.ckpt_down_proj_name: "w2"}
        found = set()
        for name in self.names.under(f"{layer.layer_name}."):
            number, matrix, suffix = (*name.removeprefix(f"{layer.layer_name}.").split(".", 2), "", "")[:3]
            shard = shards.get(matrix)
            if shard is None or not number.isdecimal() or suffix not in arrivals.slots[shard]:
                continue
            local = layer._map_global_expert_id_to_local_expert_id(int(number))
            found |= {f"{local}.{MATRICES[shard]}.{suffix}"} if local >= 0 else set()
        return found

    def _load(
        self,
        layer: Any,
        awaited: Awaited,
        suffix: str,
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """What vLLM's loaders call: a whole tensor of one expert, which may be another rank's."""
        local = layer._map_global_expert_id_to_local_expert_id(expert_id)
        if local >= 0:
            layer.expert_arrivals.take(local, shard_id, suffix, loaded_weight, param.device)
            if awaited.are_all_there(f"{local}.{MATRICES[shard_id]}.{suffix}"):
                self.process_weights_after_loading(layer)
        return local >= 0 if return_success else None


def facts_of(layer: Any) -> ExpertFacts:
    """What stands between the matrices of vLLM's experts, and where the routing weight goes."""
    said = layer.activation.value
    plain = layer.swiglu_limit is None and layer.swiglu_alpha is None
    if said not in ACTIVATIONS or not plain:
        got = said if plain else f"{said} with limit {layer.swiglu_limit} and alpha {layer.swiglu_alpha}"
        raise ArgumentError(f"{layer.layer_name}: activation", f"one of {', '.join(ACTIVATIONS)}", got)
    return ExpertFacts(ACTIVATIONS[said], "input" if layer.apply_router_weight_on_input else "output")
