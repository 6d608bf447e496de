"""From the tensors that vLLM's loaders bring to a layer that multiplies: when, and what is let go of."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qload.detect import Target, for_target
from qload.engines.vllm.checkpoint import Awaited, CheckpointNames
from qload.errors import ArgumentError, MismatchError, MissingTensorError, UnsupportedFormatError
from qload.experts import ExpertFacts, GatedActivation, LocalExperts
from qload.kernels.declared import Activations, Maximum
from qload.loader import ConfiguredFormat, FormatLoader
from qload.loader.finite_scales import Nonfinite
from qload.methods import TypedLinearMethod
from qload.methods.arrivals import Arrivals
from qload.methods.placement import Placement
from qload.methods.share_shapes import ParameterSlot, check_cuts, slots
from qload.parallel import ProcessGroup
from qload.spec import named
from qload.storage import TensorInfo
from qload.storage.protocol import missing
from qload.weights import Weights

Rows = tuple[int, int]


def watch(
    layer: nn.Module, typed: TypedLinearMethod, names: CheckpointNames, rows: Rows | None = None
) -> None:
    """Finish a layer when the last of the tensors that the checkpoint has of it was loaded."""
    arrivals: Any = layer.typed_arrivals
    place, slots = arrivals.place, arrivals.slots
    modules = {place.prefix, *place.names}
    wanted = {name for module in modules for name in names.of([module]) if _rest(name, module) in slots}
    watched = _Watched(layer, typed, rows, Awaited(wanted))
    for suffix, slot in slots.items():
        param: Any = getattr(layer, slot.param_name)
        param.weight_loader = partial(watched.load, suffix, param.weight_loader)


class _Watched:
    """A layer that is finished by its last tensor."""

    def __init__(
        self, layer: nn.Module, typed: TypedLinearMethod, rows: Rows | None, awaited: Awaited
    ) -> None:
        self.layer, self.typed, self.rows, self.awaited = layer, typed, rows, awaited

    def load(
        self,
        suffix: str,
        loader: Callable[..., None],
        param: nn.Parameter,
        loaded_weight: Tensor,
        shard_id: int | str | None = None,
    ) -> None:
        """What vLLM's loaders call with a whole tensor, and the id of its part where layers are merged."""
        loader(param, loaded_weight, shard_id)
        place: Any = self.layer.typed_arrivals.place  # type: ignore[union-attr]
        fused = len(place.parts) > 1 and shard_id is None
        number = 0 if shard_id is None else place.part(shard_id, suffix)
        if self.awaited.are_all_there(named(place.prefix if fused else place.names[number], suffix)):
            finish(self.layer, self.typed, self.rows)


def finish(layer: Any, typed: TypedLinearMethod, rows: Rows | None = None) -> None:
    """Make what multiplies, and let go of what arrived, which vLLM's loaders may still refer to.

    Parts of a merged layer that are not stored alike are multiplied one after another. `rows`: which of all
    this rank has, where its share is no equal one. A second call does nothing.
    """
    if hasattr(layer, "typed_linear"):
        return
    arrivals = layer.typed_arrivals
    arrived = [getattr(layer, slot.param_name) for slot in arrivals.slots.values()]
    device, linear = arrived[0].device, typed.loaded(layer, rows)
    for slot, param in zip(arrivals.slots.values(), arrived, strict=True):
        delattr(layer, slot.param_name)
        param.data = param.data.new_empty(0)
    arrivals.close()
    layer.typed_linear = linear
    # vLLM's latent attention asks for a weight by this name to learn its device, and multiplies to read it.
    layer.qweight = torch.empty(0, device=device)


def multiplied(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """X (..., K) -> this rank's (..., N), in x's dtype; `bias` (N,) goes into the products."""
    linear = layer.typed_linear
    y: Tensor = linear(x) if bias is None else linear(x, bias)
    return y


def padded(y: Tensor, bias: Tensor | None, size: int) -> Tensor:
    """Logits (..., rows that a rank has) -> (..., size), 0 for rows that pad a vocabulary, plus `bias`."""
    y = functional.pad(y, (0, size - y.shape[-1]))
    return y if bias is None else y + bias


def _rest(name: str, module: str) -> str:
    return name.removeprefix(f"{module}.")


MATRICES: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # by vLLM's names


class ExpertArrivals:
    """A storage of experts, numbered from 0 on this rank: `experts.0.gate_proj.qweight`.

    Parameters
    ----------
    prefix
        What the names begin with.
    formats
        What the experts may be stored as.
    sizes
        (H, I): inputs of an expert, and what lies between its matrices, on this rank.
    group
        The ranks that cut the same experts.
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
        matrices = [fmt for fmt in formats if _is_matrix(fmt)]
        self.formats = tuple(matrices)
        first = next((fmt for fmt in matrices if not fmt.weight_type.plain), matrices[0])
        self.slots: dict[str, Mapping[str, ParameterSlot]] = {}
        for shard in MATRICES:
            place = self._place(0, shard)
            check_cuts(first, place)
            self.slots[shard] = slots(matrices, place, params_dtype, by_tags=False)
        self._of: dict[str, Arrivals] = {}

    def take(self, expert: int, shard: str, suffix: str, loaded: Tensor, device: torch.device) -> None:
        """Keep this rank's share of a tensor of an expert, `shard` "w1" (gate), "w3" (up) or "w2" (down)."""
        place = self._place(expert, shard)
        own = self._of.setdefault(place.prefix, Arrivals(place, self.slots[shard]))
        empty = nn.Parameter(torch.empty(0, dtype=loaded.dtype, device=device), requires_grad=False)
        own.take(suffix, empty, loaded, None)

    def keys(self) -> Collection[str]:
        """The names of all tensors."""
        return [name for own in self._of.values() for name in [*own.keys()]]

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of the whole tensor `name`."""
        return self._find(name).info(name)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """The elements `index` of the tensor `name`, as they lie here; ArgumentError for another rank's."""
        return self._find(name).read(name, index)

    def close(self) -> None:
        """Let go of all tensors."""
        self._of.clear()

    def _find(self, name: str) -> Arrivals:
        number, matrix, _ = (*name.removeprefix(f"{self.prefix}.").split(".", 2), "", "")[:3]
        own = self._of.get(f"{self.prefix}.{number}.{matrix}")
        if own is None:
            error: MissingTensorError = missing(name, self.keys())
            raise error
        return own

    def _place(self, expert: int, shard: str) -> Placement:
        prefix = named(f"{self.prefix}.{expert}", MATRICES[shard])
        (H, inner), ranks = self._sizes, self.group.size()
        here, whole = ((H, inner), (inner * ranks, H)) if shard != "w2" else ((inner, H), (H, inner * ranks))
        K, N = here
        return Placement(prefix, (prefix,), (0,), (N,), K, whole, self.group, is_told=True)


def _is_matrix(fmt: ConfiguredFormat) -> bool:
    return all(not suffix.startswith("_") for spec in fmt.specs() for suffix in spec.suffixes)


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
