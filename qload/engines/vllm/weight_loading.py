"""Loading of linear layers and experts from the tensors that vLLM's weight loaders deliver.

A layer registers empty parameters. It is finished, and its parameters dropped, once the last tensor that the
checkpoint has of it is loaded.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qload.engines.vllm.checkpoint import CheckpointNames, PendingTensors
from qload.errors import ArgumentError, UnsupportedFormatError
from qload.experts import ExpertFacts, GatedActivation
from qload.methods import TypedExpertsMethod, TypedLinearMethod
from qload.methods.typed_experts import MATRICES, ExpertBuffer
from qload.spec import named

Rows = tuple[int, int]

BIASES = ("w13_bias", "w2_bias")  # vLLM's parameters of experts with biases
ACTIVATIONS: Mapping[str, GatedActivation] = {
    "silu": GatedActivation("silu"),
    "gelu": GatedActivation("gelu"),
    "gelu_tanh": GatedActivation("gelu_tanh"),
}


def finish_when_loaded(
    layer: nn.Module, typed: TypedLinearMethod, names: CheckpointNames, rows: Rows | None = None
) -> None:
    """Finish a linear layer when the last of its tensors in the checkpoint is loaded."""
    buffer: Any = layer.parameter_buffer
    share = buffer.layer
    pending = PendingTensors(
        {
            name
            for module in {share.prefix, *share.names}
            for name in names.tensors_of([module])
            if name.removeprefix(f"{module}.") in buffer.slots
        }
    )

    def load(
        suffix: str,
        loader: Callable[..., None],
        param: nn.Parameter,
        loaded_weight: Tensor,
        shard_id: int | str | None = None,
    ) -> None:
        """Load a whole tensor, called by vLLM; `shard_id`: its part of a merged layer."""
        loader(param, loaded_weight, shard_id)
        is_fused = len(share.parts) > 1 and shard_id is None
        number = 0 if shard_id is None else share.part_number(shard_id, suffix)
        if pending.mark_loaded(named(share.prefix if is_fused else share.names[number], suffix)):
            finish_linear(layer, typed, rows)

    for suffix, slot in buffer.slots.items():
        param: Any = getattr(layer, slot.param_name)
        param.weight_loader = partial(load, suffix, param.weight_loader)


def finish_linear(layer: Any, typed: TypedLinearMethod, rows: Rows | None = None) -> None:
    """Create the qload layer, and free the loaded tensors, to which vLLM's loaders may keep references.

    `rows`: this rank's rows, for unequal shares. A second call does nothing.
    """
    if hasattr(layer, "typed_linear"):
        return
    params = [slot.param_name for slot in layer.parameter_buffer.slots.values()]
    loaded = [getattr(layer, name) for name in params if hasattr(layer, name)]
    device = loaded[0].device
    typed.finish(layer, rows)
    for param in loaded:
        param.data = param.data.new_empty(0)
    # vLLM's latent attention reads the device of a weight with this name, and multiplies to read its values.
    layer.qweight = torch.empty(0, device=device)


def apply_linear(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x (..., K) -> this rank's (..., N), in the dtype of x; `bias` (N,) is added in the product."""
    linear = layer.typed_linear
    y: Tensor = linear(x) if bias is None else linear(x, bias)
    return y


def pad_logits(y: Tensor, bias: Tensor | None, size: int) -> Tensor:
    """Pad logits (..., this rank's rows) with 0 to (..., size), the padded vocabulary, and add `bias`."""
    y = functional.pad(y, (0, size - y.shape[-1]))
    return y if bias is None else y + bias


def expert_facts(layer: Any) -> ExpertFacts:
    """Return the computation inside vLLM's experts; ArgumentError for an unsupported one."""
    activation = layer.activation.value
    is_limited = layer.swiglu_limit is not None or layer.swiglu_alpha is not None
    if activation not in ACTIVATIONS or is_limited:
        limits = f" with limit {layer.swiglu_limit} and alpha {layer.swiglu_alpha}" if is_limited else ""
        expected = f"one of {', '.join(ACTIVATIONS)}"
        raise ArgumentError(f"{layer.layer_name}: activation", expected, f"{activation}{limits}")
    return ExpertFacts(ACTIVATIONS[activation], "input" if layer.apply_router_weight_on_input else "output")


def check_parallelism(name: str, moe: Any) -> None:
    """Raise ArgumentError for an untested parallelism of the experts `name`, by vLLM's own name for it.

    `moe`: vLLM's `FusedMoEConfig`. Supported are tensor parallelism, and whole experts on its ranks.
    """
    parallel = moe.moe_parallel_config
    one = "1, as experts are split by tensor or by expert"
    constant = "False: experts do not change after the load"
    backend = parallel.all2all_backend if parallel.use_ep else ""
    for key, value, expected, refused in (
        ("data_parallel_size", parallel.dp_size, one, parallel.dp_size > 1),
        ("prefill_context_parallel_size", parallel.pcp_size, one, parallel.pcp_size > 1),
        ("sequence parallel ranks", parallel.sp_size, one, parallel.sp_size > 1),
        ("all2all_backend", backend, "a backend without an exchange of tokens", backend == "passthrough"),
        ("enable_eplb", parallel.enable_eplb, constant, parallel.enable_eplb),
        ("enable_lora", moe.is_lora_enabled, constant, moe.is_lora_enabled),
    ):
        if refused:
            raise ArgumentError(f"{name}: {key}", expected, str(value))


def finish_experts_when_loaded(layer: Any, typed: TypedExpertsMethod, names: CheckpointNames) -> None:
    """Finish the experts of a layer when the last of their tensors in the checkpoint is loaded."""
    buffer: ExpertBuffer = layer.expert_buffer
    pending = PendingTensors(_local_tensors(layer, buffer, names))

    def load(
        suffix: str,
        loader: Callable[..., None],
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Load a whole tensor of one expert, called by vLLM for the experts of all ranks."""
        local = layer._map_global_expert_id_to_local_expert_id(expert_id)
        if local >= 0:
            loader(param, loaded_weight, weight_name, shard_id, local)
            if pending.mark_loaded(f"{local}.{MATRICES[shard_id]}.{suffix}"):
                typed.finish(layer)
        return local >= 0 if return_success else None

    for name, slot in buffer.parameters().items():
        param: Any = getattr(layer, name)
        param.weight_loader = partial(load, slot.suffix, param.weight_loader)
    for name in BIASES:
        bias: Any = nn.Parameter(torch.empty(0), requires_grad=False)
        bias.weight_loader = partial(_refuse_bias, layer.layer_name)
        layer.register_parameter(name, bias)


def _refuse_bias(
    layer_name: str, param: nn.Parameter, loaded_weight: Tensor, *_: Any, expert_id: int, **__: Any
) -> bool:
    """Refuse a bias other than 0, which vLLM would ignore; some tools write biases of 0."""
    if bool(loaded_weight.any()):
        problem = "a bias other than 0, and experts with biases are not supported in vLLM"
        raise UnsupportedFormatError(f"{layer_name}.{expert_id}", problem)
    return True


def _local_tensors(layer: Any, buffer: ExpertBuffer, names: CheckpointNames) -> set[str]:
    """Names of all tensors of this rank's experts, such as `3.gate_proj.qweight`, by their local number."""
    projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    shards = dict(zip(projections, ("w1", "w3", "w2"), strict=True))
    tensors = set()
    for name in names.under(f"{layer.layer_name}."):
        number, matrix, suffix = (*name.removeprefix(f"{layer.layer_name}.").split(".", 2), "", "")[:3]
        shard = shards.get(matrix)
        if shard is None or not number.isdecimal() or suffix not in buffer.slots[shard]:
            continue
        local = layer._map_global_expert_id_to_local_expert_id(int(number))
        if local >= 0:
            tensors.add(f"{local}.{MATRICES[shard]}.{suffix}")
    return tensors
