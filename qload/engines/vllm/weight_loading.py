"""Loading of linear layers and experts from the tensors that vLLM's weight loaders deliver.

A layer registers empty parameters. It is finished, and its parameters dropped, once the last tensor that the
checkpoint has of it is loaded.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qload.detect import Target, for_target
from qload.engines.vllm.checkpoint import CheckpointNames, PendingTensors
from qload.errors import ArgumentError, MismatchError, MissingTensorError, UnsupportedFormatError
from qload.experts import ExpertFacts, ExpertSplit, GatedActivation, LocalExperts
from qload.kernels.declared import Activations, Maximum
from qload.loader import ConfiguredFormat, FormatLoader
from qload.loader.source import Nonfinite
from qload.methods import TypedLinearMethod
from qload.methods.parameter_buffer import (
    LayerShare,
    ParameterBuffer,
    ParameterSlot,
    check_cuts,
    matrix_formats,
    parameter_slots,
)
from qload.parallel import ProcessGroup
from qload.spec import named
from qload.storage import TensorInfo
from qload.storage.protocol import missing
from qload.weights import Weights

Rows = tuple[int, int]

MATRICES: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # by vLLM's names
PARAMETERS = {"w13": ("w1", "w3"), "w2": ("w2",)}  # prefixes of vLLM's parameters of experts
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


class ExpertBuffer:
    """Storage of loaded tensors of experts, numbered from 0 on this rank: `experts.0.gate_proj.qweight`.

    Parameters
    ----------
    prefix
        Prefix of the names.
    formats
        Formats of the experts to try.
    sizes
        (H, I): hidden size, and intermediate size on this rank.
    group
        Ranks that split the same experts.
    params_dtype
        Of plain numbers.
    """

    def __init__(
        self,
        prefix: str,
        formats: Sequence[ConfiguredFormat],
        sizes: tuple[int, int],
        group: ProcessGroup,
        params_dtype: torch.dtype,
    ) -> None:
        self.prefix, self.group = prefix, group
        self._sizes = sizes
        self.formats = tuple(matrix_formats(formats))
        self.slots: dict[str, Mapping[str, ParameterSlot]] = {}
        for shard in MATRICES:
            share = self._share(0, shard)
            check_cuts(self.formats, share)
            self.slots[shard] = parameter_slots(self.formats, share, params_dtype, by_attrs=False)
        self._matrices: dict[str, ParameterBuffer] = {}

    def add(self, expert: int, shard: str, suffix: str, loaded: Tensor, device: torch.device) -> None:
        """Add this rank's share of a tensor of an expert, `shard` "w1" (gate), "w3" (up) or "w2" (down)."""
        share = self._share(expert, shard)
        matrix = self._matrices.setdefault(share.prefix, ParameterBuffer(share, self.slots[shard]))
        empty = nn.Parameter(torch.empty(0, dtype=loaded.dtype, device=device), requires_grad=False)
        matrix.load(suffix, empty, loaded)

    def keys(self) -> Collection[str]:
        """Return the names of all tensors."""
        return [name for matrix in self._matrices.values() for name in [*matrix.keys()]]

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of the whole tensor `name`."""
        return self._matrix_of(name).info(name)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return the elements `index` of the tensor `name`; ArgumentError for those of another rank."""
        return self._matrix_of(name).read(name, index)

    def readable(self, name: str) -> tuple[tuple[int, int], ...] | None:
        """Return (start, stop) along each axis of this rank's share of the tensor `name`."""
        return self._matrix_of(name).readable(name)

    def close(self) -> None:
        """Free all tensors."""
        self._matrices.clear()

    def _matrix_of(self, name: str) -> ParameterBuffer:
        number, matrix, _ = (*name.removeprefix(f"{self.prefix}.").split(".", 2), "", "")[:3]
        buffer = self._matrices.get(f"{self.prefix}.{number}.{matrix}")
        if buffer is None:
            error: MissingTensorError = missing(name, self.keys())
            raise error
        return buffer

    def _share(self, expert: int, shard: str) -> LayerShare:
        prefix = named(f"{self.prefix}.{expert}", MATRICES[shard])
        (H, inner), ranks = self._sizes, self.group.size()
        K, N, shape = (H, inner, (inner * ranks, H)) if shard != "w2" else (inner, H, (H, inner * ranks))
        return LayerShare(prefix, (prefix,), (0,), (N,), K, shape, self.group, has_rank=True)


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


def register_experts(
    layer: Any, buffer: ExpertBuffer, names: CheckpointNames, finish: Callable[[], None]
) -> None:
    """Register parameters for all tensors of experts; `finish` is called after the last of them."""
    pending = PendingTensors(_local_tensors(layer, buffer, names))

    def load(
        suffix: str,
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
            buffer.add(local, shard_id, suffix, loaded_weight, param.device)
            if pending.mark_loaded(f"{local}.{MATRICES[shard_id]}.{suffix}"):
                finish()
        return local >= 0 if return_success else None

    for lead, shards in PARAMETERS.items():
        for suffix, slot in buffer.slots[shards[0]].items():
            param: Any = nn.Parameter(torch.empty(0, dtype=slot.dtype), requires_grad=False)
            param.weight_loader = partial(load, suffix)
            layer.register_parameter(f"{lead}_{slot.param_name}", param)
        bias: Any = nn.Parameter(torch.empty(0), requires_grad=False)
        bias.weight_loader = partial(_refuse_bias, layer.layer_name)
        layer.register_parameter(f"{lead}_bias", bias)


def finish_experts(
    layer: Any,
    buffer: ExpertBuffer,
    target: Target | None,
    activations: Activations,
    nonfinite: Nonfinite = "error",
    logged: set[str] | None = None,
) -> None:
    """Create qload's experts, and free the loaded tensors. A second call does nothing.

    The empty parameters stay until `drop_expert_parameters`: vLLM's loaders look them up for tensors of other
    ranks' experts too.
    """
    if hasattr(layer, "typed_experts"):
        return
    stored = FormatLoader(*buffer.formats)
    stored.logged = set() if logged is None else logged
    loader = for_target(stored, target)
    device, dtype = next(iter(_expert_parameters(layer).values())).device, layer.params_dtype
    options: dict[str, Any] = {"device": device, "process_group": buffer.group, "nonfinite": nonfinite}
    weights = Weights(buffer, loader=loader, dtype=dtype, **options)
    is_split = buffer.group.size() > 1
    split: ExpertSplit | None = "tensor" if is_split else None
    experts = weights.get_experts(buffer.prefix, split=split, facts=layer.expert_facts)
    count = layer.local_num_experts
    if len(experts.local) != count:
        raise MismatchError(buffer.prefix, "not all loaded", f"{count} experts", str(len(experts.local)))
    experts = replace(experts, local=LocalExperts(0, count, count + 1))  # the last one is on no rank
    buffer.close()
    maximum: Maximum = "own" if is_split else None
    layer.typed_experts = experts.get_linear(activations=activations, maximum=maximum, dtype=weights.dtype)


def drop_expert_parameters(layer: Any) -> None:
    """Drop the parameters, after all tensors are loaded."""
    for name in _expert_parameters(layer):
        delattr(layer, name)


def apply_experts(layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Apply this rank's experts to x (T, H), in its dtype; experts of other ranks contribute 0.

    `topk_ids`, `topk_weights`: (T, k), numbers of the whole layer's experts, and their routing weights.
    """
    ids = topk_ids.long()
    if layer.expert_map is not None:
        local = layer.expert_map[ids].long()
        ids = torch.where(local < 0, layer.local_num_experts, local)
    y: Tensor = layer.typed_experts(x, ids, topk_weights)
    return y


def _expert_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    parameters = layer.named_parameters(recurse=False)
    return {name: param for name, param in parameters if name.partition("_")[0] in PARAMETERS}


def _refuse_bias(
    layer_name: str, param: nn.Parameter, loaded_weight: Tensor, *_: Any, expert_id: int = 0, **__: Any
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
