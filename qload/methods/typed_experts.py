"""One experts method for every format, beside the linear one of `typed_linear`.

    method = TypedExpertsMethod(loader.formats, "model.layers.0.mlp.experts", facts)
    method.create_weights(layer, E, H, I, torch.bfloat16, group=Rank(0, 2))
    ...                                           # load(param, tensor, name, shard_id, expert_id)
    method.process_weights_after_loading(layer)   # creates layer.typed_experts
    y = method.apply(layer, x, topk_weights, topk_ids)

An expert has three matrices, by the shard ids of engines: "w1" (gate), "w3" (up) and "w2" (down). Parameter
`w13_qweight` takes the tensors `qweight` of gate and up of all experts, `w2_qweight` those of down.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qload.detect import Target, for_target
from qload.errors import ArgumentError, MismatchError, MissingTensorError, check_type
from qload.experts import ExpertFacts, ExpertSplit, LocalExperts
from qload.kernels.declared import Activations, Maximum
from qload.loader import ConfiguredFormat, FormatLoader
from qload.loader.source import Nonfinite
from qload.methods.base import QuantizeMethodBase
from qload.methods.parameter_buffer import (
    LayerShare,
    ParameterBuffer,
    ParameterSlot,
    check_cuts,
    matrix_formats,
    parameter_slots,
)
from qload.parallel import ALONE, ProcessGroup
from qload.spec import named
from qload.storage import TensorInfo
from qload.storage.protocol import missing
from qload.weights import Weights

MATRICES: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # by shard id
PARAMETERS = {"w13": ("w1", "w3"), "w2": ("w2",)}  # shard ids by the prefix of a parameter


class TypedExpertsMethod(QuantizeMethodBase):
    """Method of the experts of a layer in any format, which multiplies as `ExpertsWeight.get_linear` does.

    Parameters
    ----------
    formats
        Formats that the experts may be stored in.
    prefix
        Name of the experts, for messages.
    facts
        Computation inside an expert.
    target
        Kernel that the weights are repacked for, as in `loader_from_config`; None: as stored.
    activations
        "declared" or "unquantized", as in `Weight.get_linear`.
    nonfinite
        Handling of scales that are NaN or infinite, as in `open_checkpoint`.
    logged
        Messages already logged about the checkpoint's layers, as `FormatLoader.logged`; None: none.
    """

    def __init__(
        self,
        formats: Sequence[ConfiguredFormat],
        prefix: str,
        facts: ExpertFacts,
        *,
        target: Target | None = "auto",
        activations: Activations = "declared",
        nonfinite: Nonfinite = "error",
        logged: set[str] | None = None,
    ) -> None:
        check_type("facts", facts, ExpertFacts)
        self.formats = tuple(formats)
        self.prefix, self.facts = prefix, facts
        self.target, self.activations = target, activations
        self.nonfinite: Nonfinite = nonfinite
        self.logged: set[str] = set() if logged is None else logged

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        *,
        group: ProcessGroup = ALONE,
    ) -> None:
        """Register a parameter for every tensor that an expert may have; their memory comes with the load.

        Their `weight_loader` takes a whole tensor of one expert, its name, its shard id, and the number of
        the expert among the `num_experts` of this rank. The ranks of `group` split each expert: this one has
        gate and up (`intermediate_size_per_partition`, `hidden_size`), and down the other way round. Plain
        numbers are loaded as `params_dtype`.

        ArgumentError for invalid sizes, and for a layer with such weights; CutError or DivideError, the same
        on every rank, if the format cannot be cut so.
        """
        if hasattr(layer, "expert_buffer"):
            raise ArgumentError(self.prefix, "a layer without weights", "a layer with weights")
        sizes = (num_experts, hidden_size, intermediate_size_per_partition)
        if not all(type(size) is int and size > 0 for size in sizes):
            expected = "sizes of at least 1"
            raise ArgumentError(
                "num_experts, hidden_size, intermediate_size_per_partition", expected, repr(sizes)
            )
        buffer = ExpertBuffer(self.prefix, self.formats, sizes, group, params_dtype)
        for name, slot in buffer.parameters().items():
            param: Any = nn.Parameter(torch.empty(0, dtype=slot.dtype), requires_grad=False)
            param.weight_loader = partial(self._load, layer, slot.suffix)
            layer.register_parameter(name, param)
        layer.expert_buffer = buffer  # type: ignore[assignment]
        layer.params_dtype = params_dtype  # type: ignore[assignment]

    def _load(
        self,
        layer: Any,
        suffix: str,
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
    ) -> None:
        layer.expert_buffer.add(expert_id, shard_id, suffix, loaded_weight, param.device)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Create `layer.typed_experts` from the tensors loaded into `layer`, and drop the parameters.

        A second call does nothing. Errors are those of a load: MissingTensorError for a missing tensor,
        ShapeError for a wrong shape; MismatchError if experts are missing.
        """
        self.finish(layer)
        for name in layer.expert_buffer.parameters():
            if hasattr(layer, name):
                delattr(layer, name)

    def finish(self, layer: Any) -> None:
        """Create `layer.typed_experts`, and free the loaded tensors; the empty parameters stay.

        Engines look up the parameters for tensors of other ranks' experts too. A second call does nothing.
        MismatchError if experts are missing.
        """
        if hasattr(layer, "typed_experts"):
            return
        buffer: ExpertBuffer = layer.expert_buffer
        stored = FormatLoader(*buffer.formats)
        stored.logged = self.logged
        device = getattr(layer, next(iter(buffer.parameters()))).device
        options: dict[str, Any] = {"device": device, "process_group": buffer.group}
        loader, nonfinite = for_target(stored, self.target), self.nonfinite
        weights = Weights(buffer, loader=loader, dtype=layer.params_dtype, nonfinite=nonfinite, **options)
        is_split = buffer.group.size() > 1
        split: ExpertSplit | None = "tensor" if is_split else None
        experts = weights.get_experts(buffer.prefix, split=split, facts=self.facts)
        count = buffer.num_experts
        if len(experts.local) != count:
            raise MismatchError(buffer.prefix, "not all loaded", f"{count} experts", str(len(experts.local)))
        experts = replace(experts, local=LocalExperts(0, count, count + 1))  # the last one is on no rank
        buffer.close()
        maximum: Maximum = "own" if is_split else None
        options = {"activations": self.activations, "maximum": maximum, "dtype": weights.dtype}
        layer.typed_experts = experts.get_linear(**options)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """Apply this rank's experts to x (T, H), in its dtype; experts of other ranks contribute 0.

        `topk_ids`, `topk_weights`: (T, k), numbers of experts, and their routing weights. `expert_map`: (E,),
        the number on this rank of each expert of the layer, -1 for one of another rank; None: all are here.
        ArgumentError before `process_weights_after_loading`.
        """
        experts: nn.Module | None = getattr(layer, "typed_experts", None)
        if experts is None:
            first = "process_weights_after_loading before the first call"
            raise ArgumentError(self.prefix, first, "a call")
        ids = topk_ids.long()
        if expert_map is not None:
            local = expert_map[ids].long()
            ids = torch.where(local < 0, layer.expert_buffer.num_experts, local)
        y: Tensor = experts(x, ids, topk_weights)
        return y


class ExpertBuffer:
    """Storage of loaded tensors of experts, numbered from 0 on this rank: `experts.0.gate_proj.qweight`.

    Parameters
    ----------
    prefix
        Prefix of the names.
    formats
        Formats of the experts to try.
    sizes
        (E, H, I): experts on this rank, hidden size, and intermediate size on this rank.
    group
        Ranks that split the same experts.
    params_dtype
        Of plain numbers.
    """

    def __init__(
        self,
        prefix: str,
        formats: Sequence[ConfiguredFormat],
        sizes: tuple[int, int, int],
        group: ProcessGroup,
        params_dtype: torch.dtype,
    ) -> None:
        self.prefix, self.group = prefix, group
        self.num_experts, *self._sizes = sizes
        self.formats = tuple(matrix_formats(formats))
        self.slots: dict[str, Mapping[str, ParameterSlot]] = {}
        for shard in MATRICES:
            share = self._share(0, shard)
            check_cuts(self.formats, share)
            self.slots[shard] = parameter_slots(self.formats, share, params_dtype, by_attrs=False)
        self._matrices: dict[str, ParameterBuffer] = {}

    def parameters(self) -> dict[str, ParameterSlot]:
        """Return the slot of each parameter, by its name, such as `w13_qweight`."""
        slots = {prefix: self.slots[shards[0]].values() for prefix, shards in PARAMETERS.items()}
        return {f"{prefix}_{slot.param_name}": slot for prefix in slots for slot in slots[prefix]}

    def add(self, expert: int, shard: str, suffix: str, loaded: Tensor, device: torch.device) -> None:
        """Add this rank's share of a tensor of an expert, `shard` "w1" (gate), "w3" (up) or "w2" (down).

        ArgumentError for another shard, and for an expert of another rank.
        """
        if shard not in MATRICES or not 0 <= expert < self.num_experts:
            listed = f"one of {', '.join(MATRICES)}, of an expert below {self.num_experts}"
            raise ArgumentError(f"{self.prefix}: shard_id, expert_id", listed, f"{shard!r}, {expert}")
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
