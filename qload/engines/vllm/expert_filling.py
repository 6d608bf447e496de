"""Routed experts of vLLM's: which tensors they wait for, and what multiplies once all are there."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qload.detect import Target, for_target
from qload.engines.vllm.expert_arrivals import MATRICES, ExpertArrivals
from qload.engines.vllm.names import Awaited, CheckpointNames
from qload.errors import ArgumentError, MismatchError, UnsupportedFormatError
from qload.experts import ExpertFacts, GatedActivation, LocalExperts
from qload.kernels.declared import Activations, Maximum
from qload.loader import FormatLoader
from qload.loader.finite_scales import Nonfinite
from qload.weights import Weights

PARAMETERS = {"w13": ("w1", "w3"), "w2": ("w2",)}  # vLLM's names of an expert's parameters begin so
ACTIVATIONS: Mapping[str, GatedActivation] = {
    "silu": GatedActivation("silu"),
    "gelu": GatedActivation("gelu"),
    "gelu_tanh": GatedActivation("gelu_tanh"),
}


def facts_of(layer: Any) -> ExpertFacts:
    """What stands between the matrices of vLLM's experts; ArgumentError for what qload has no product for."""
    said = layer.activation.value
    plain = layer.swiglu_limit is None and layer.swiglu_alpha is None
    if said not in ACTIVATIONS or not plain:
        got = said if plain else f"{said} with limit {layer.swiglu_limit} and alpha {layer.swiglu_alpha}"
        raise ArgumentError(f"{layer.layer_name}: activation", f"one of {', '.join(ACTIVATIONS)}", got)
    return ExpertFacts(ACTIVATIONS[said], "input" if layer.apply_router_weight_on_input else "output")


def check_ranks(name: str, moe: Any) -> None:
    """ArgumentError for a way to run the experts `name` that was not tried, by vLLM's own name for it.

    `moe`: vLLM's `FusedMoEConfig`. What runs is tensor parallel, and whole experts on its ranks.
    """
    parallel = moe.moe_parallel_config
    sizes = {
        "data_parallel_size": parallel.dp_size,
        "prefill_context_parallel_size": parallel.pcp_size,
        "sequence parallel ranks": parallel.sp_size,
    }
    for what, size in sizes.items():
        if size > 1:
            raise ArgumentError(f"{name}: {what}", "1, as experts have no other way here", str(size))
    if parallel.use_ep and parallel.all2all_backend == "passthrough":
        expected = "a backend that leaves tokens where they are"
        raise ArgumentError(f"{name}: all2all_backend", expected, parallel.all2all_backend)
    unlike = {"enable_eplb": parallel.enable_eplb, "enable_lora": moe.is_lora_enabled}
    for what, asked in unlike.items():
        if asked:
            raise ArgumentError(f"{name}: {what}", "False: experts stay as they were loaded", str(asked))


def watch_experts(
    layer: Any, arrivals: ExpertArrivals, names: CheckpointNames, done: Callable[[], None]
) -> None:
    """Register parameters through which vLLM's loaders bring all tensors; `done` follows the last of them."""
    awaited = Awaited(_wanted(layer, arrivals, names))
    for lead, shards in PARAMETERS.items():
        for suffix, slot in arrivals.slots[shards[0]].items():
            param: Any = nn.Parameter(torch.empty(0, dtype=slot.dtype), requires_grad=False)
            param.weight_loader = partial(_load, (layer, arrivals, awaited, done), suffix)
            layer.register_parameter(f"{lead}_{slot.param_name}", param)
        bias: Any = nn.Parameter(torch.empty(0), requires_grad=False)
        bias.weight_loader = partial(_no_bias, layer.layer_name)
        layer.register_parameter(f"{lead}_bias", bias)


def finish_experts(
    layer: Any,
    arrivals: ExpertArrivals,
    target: Target | None,
    activations: Activations,
    nonfinite: Nonfinite = "error",
    logged: set[str] | None = None,
) -> None:
    """Make what multiplies, and let go of what arrived. A second call does nothing.

    The parameters stay, empty as they are, until `unwatch_experts`: the tensors of experts that other ranks
    have may come yet, and vLLM's loaders look up where to.
    """
    if hasattr(layer, "typed_experts"):
        return
    stored = FormatLoader(*arrivals.formats)
    stored.logged = set() if logged is None else logged
    loader = for_target(stored, target)
    device, dtype = next(iter(_params(layer).values())).device, layer.params_dtype
    options: dict[str, Any] = {"device": device, "process_group": arrivals.group, "nonfinite": nonfinite}
    weights = Weights(arrivals, loader=loader, dtype=dtype, **options)
    cut = arrivals.group.size() > 1
    made = weights.get_experts(arrivals.prefix, split="tensor" if cut else None, facts=layer.expert_facts)
    count = layer.local_num_experts
    if len(made.local) != count:
        raise MismatchError(arrivals.prefix, "not all loaded", f"{count} experts", str(len(made.local)))
    made = replace(made, local=LocalExperts(0, count, count + 1))  # the last one is on no rank
    arrivals.close()
    own: Maximum = "own" if cut else None
    layer.typed_experts = made.get_linear(activations=activations, maximum=own, dtype=weights.dtype)


def unwatch_experts(layer: Any) -> None:
    """Drop the parameters, once no tensor comes any more."""
    for name in _params(layer):
        delattr(layer, name)


def routed(layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """What the experts that are here make of x (T, H), in its dtype; those of other ranks contribute 0.

    `topk_ids`, `topk_weights`: (T, k), numbers of the whole layer's experts, and what they weigh.
    """
    ids = topk_ids.long()
    if layer.expert_map is not None:
        here = layer.expert_map[ids].long()
        ids = torch.where(here < 0, layer.local_num_experts, here)
    y: Tensor = layer.typed_experts(x, ids, topk_weights)
    return y


def _params(layer: nn.Module) -> dict[str, nn.Parameter]:
    held = layer.named_parameters(recurse=False)
    return {name: param for name, param in held if name.partition("_")[0] in PARAMETERS}


def _no_bias(
    layer_name: str, param: nn.Parameter, loaded_weight: Tensor, *_: Any, expert_id: int = 0, **__: Any
) -> bool:
    """Refuse a bias that means something, which vLLM would leave out; tools write some that are all 0."""
    if bool(loaded_weight.any()):
        what = "a bias that is not 0, and experts with biases are not taken in vLLM"
        raise UnsupportedFormatError(f"{layer_name}.{expert_id}", what)
    return True


def _wanted(layer: Any, arrivals: ExpertArrivals, names: CheckpointNames) -> set[str]:
    """All tensors of the experts that are here, as `3.gate_proj.qweight` of the third on this rank."""
    projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    shards = dict(zip(projections, ("w1", "w3", "w2"), strict=True))
    found = set()
    for name in names.under(f"{layer.layer_name}."):
        number, matrix, suffix = (*name.removeprefix(f"{layer.layer_name}.").split(".", 2), "", "")[:3]
        shard = shards.get(matrix)
        if shard is None or not number.isdecimal() or suffix not in arrivals.slots[shard]:
            continue
        local = layer._map_global_expert_id_to_local_expert_id(int(number))
        if local >= 0:
            found.add(f"{local}.{MATRICES[shard]}.{suffix}")
    return found


def _load(
    watched: tuple[Any, ExpertArrivals, Awaited, Callable[[], None]],
    suffix: str,
    param: nn.Parameter,
    loaded_weight: Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """What vLLM's loaders call: a whole tensor of one expert, which may be another rank's."""
    layer, arrivals, awaited, done = watched
    local = layer._map_global_expert_id_to_local_expert_id(expert_id)
    if local >= 0:
        arrivals.take(local, shard_id, suffix, loaded_weight, param.device)
        if awaited.are_all_there(f"{local}.{MATRICES[shard_id]}.{suffix}"):
            done()
    return local >= 0 if return_success else None
