"""`QloadQuantizer`: the quantizer that transformers calls before and after it loads a model's other tensors.

Before, quantized layers are replaced by placeholders; after, each placeholder is filled with this rank's
share of its layer, on the device of the device map.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.distributed.parallel_utils import _get_parameter_plan
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from qload.architecture.names import is_adapter, refuse_adapters
from qload.engines.transformers.checkpoint import (
    FILE_NAME_KEY,
    FILES_KEY,
    CheckpointReader,
    add_files,
    check_files,
    nondefault_files,
)
from qload.engines.transformers.config import QloadConfig
from qload.engines.transformers.layer_names import LayerMap, ModelNames, map_layers, name_patterns
from qload.engines.transformers.operands import (
    ClassExperts,
    EmbeddingRows,
    replace_matrix,
    replace_stacks,
    replace_table,
)
from qload.engines.transformers.placeholder_layers import (
    BIASES,
    LinearSlot,
    PlaceholderLayer,
    expert_stacks,
    is_dispatched_by_config,
    refuse_casts,
    replace_experts,
    resolve_facts,
)
from qload.engines.transformers.saving import save_model
from qload.errors import ArgumentError, ShapeError, UnreadTensorsError, UnsupportedFormatError
from qload.errors.exceptions import list_names
from qload.experts import ExpertFacts, ExpertSplit
from qload.experts.load import load_experts, plan_experts
from qload.formats.unquantized import FLOATS
from qload.kernels.declared import Maximum
from qload.kernels.embedding import QuantizedRows
from qload.kernels.experts_function import check_inputs
from qload.methods.checkpoint_linear import maximum_for
from qload.parallel import ALONE, ProcessGroup, Rank
from qload.quantize import QuantizingLoader
from qload.spec import Weight, named
from qload.weights import Load, Weights
from qload.weights.weights import parts_of

log: logging.Logger = logging.getLogger("qload")

MAX_LISTED_NAMES = 5

COLUMN_STYLES = ("colwise", "colwise_rep", "colwise_gather_output")
ROW_STYLES = ("rowwise", "rowwise_rep", "rowwise_split_input")
FUSED_STYLE = "packed_colwise"  # gate and up in one layer, each split by columns
REPLICATED_STYLES = (None, "mla_kv_a_proj", "replicate", "replicated_with_grad_allreduce", "local_params")
EXPERTS_STYLE = "moe_tp_experts"
UNSUPPORTED_SIZES = {  # of transformers' DistributedConfig, with the reason
    "ep_size": "ranks have a share of each expert",
    "fsdp_size": "quantized weights are not parameters and cannot be gathered",
    "dp_replicate_size": "quantized weights are not parameters and cannot be gathered",
    "pp_size": "every rank has a share of every layer",
}


@dataclass(frozen=True)
class LayerDevice:
    """Device of a layer; `offloaded`: its tensors stay on the CPU and are copied for each call."""

    device: torch.device
    offloaded: bool = False


def check_device_map(device_map: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ArgumentError if a map puts one of the layers `names` on "disk" or "meta"."""
    for name in names:
        device = str(look_up(device_map, name))
        if device in ("disk", "meta"):
            expected = "a device or 'cpu' for each quantized layer: tensors are not offloaded to a disk"
            raise ArgumentError("device_map", expected, f"{device!r} for {name}")


def look_up(device_map: Mapping[str, Any], name: str) -> Any:
    """Return the entry for the module `name`, or for its nearest parent in the map; None if there is none."""
    return next((device_map[key] for key in _parents(name) if device_map.get(key) is not None), None)


def _parents(name: str) -> Iterator[str]:
    """Yield a module's name and those of its parents, with "" as the last."""
    segments = name.split(".")
    return (".".join(segments[:count]) for count in range(len(segments), -1, -1))


def layer_devices(
    model: Any, device_map: Mapping[str, Any] | None, names: Iterable[str]
) -> dict[str, LayerDevice]:
    """Return the device of each of the modules `names`, once the model is dispatched.

    A model on one device has no hooks; of a model on several the hooks have the execution devices.
    """
    dispatched: Mapping[str, Any] = getattr(model, "hf_device_map", {})
    if not dispatched:
        return {name: LayerDevice(_as_device(look_up(device_map or {}, name))) for name in names}
    devices = {}
    for name in names:
        device = _as_device(_execution_device(model, name))
        offloaded = look_up(dispatched, name) == "cpu" and str(device) != "cpu"
        devices[name] = LayerDevice(device, offloaded)
    return devices


def offload_if_mapped(linear: nn.Module, place: LayerDevice) -> None:
    """Move the tensors of an offloaded layer to the CPU, with a hook that copies them for each call."""
    if not place.offloaded:
        return
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    linear.to("cpu")
    add_hook_to_module(linear, AlignDevicesHook(place.device, offload=True, offload_buffers=True))


def _execution_device(model: nn.Module, name: str) -> Any:
    """Execution device in the hook of a module, or of its nearest parent with one."""
    for parent in _parents(name):
        hook = getattr(model.get_submodule(parent), "_hf_hook", None)
        hooks = getattr(hook, "hooks", (hook,))
        devices = (getattr(part, "execution_device", None) for part in hooks)
        device = next(filter(None, devices), None)
        if isinstance(device, Mapping):
            device = look_up(device, name)
        if device is not None:
            return device
    return None


def _as_device(entry: Any) -> torch.device:
    if isinstance(entry, int):
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cuda" if accelerator is None else accelerator.type, entry)
    return torch.device("cpu" if entry is None else entry)


class TensorParallelPlan:
    """Split of a model's layers over the ranks, by transformers' plan for the model.

    ArgumentError for expert parallelism, in which transformers exchanges tokens between ranks, and for data
    and pipeline parallelism.

    Parameters
    ----------
    model
        transformers' model.
    """

    def __init__(self, model: Any) -> None:
        distributed = getattr(model.config, "distributed_config", None)
        self.ranks: int = 1 if distributed is None else distributed.tp_size
        styles = dict(model.tp_plan or {}) if self.ranks > 1 else {}
        overrides = getattr(distributed, "tp_plan", None)
        self._styles: Mapping[str, str] = styles | (overrides if isinstance(overrides, dict) else {})
        for name, reason in UNSUPPORTED_SIZES.items():
            size = getattr(distributed, name, None) or 1
            if size > 1:
                raise ArgumentError(name, f"1: {reason}", str(size))

    def load(self, name: str, prefixes: tuple[str, ...]) -> Load:
        """Return the load of the layers `prefixes`, joined, for the module `name` of the model."""
        style = _get_parameter_plan(name, self._styles, is_weight=False)
        if style in COLUMN_STYLES:
            return Load(prefixes, "N")
        if style in ROW_STYLES:
            return Load(prefixes, "K")
        if style == FUSED_STYLE:
            return Load(prefixes, "N", block_sizes=2 if len(prefixes) == 1 else None)
        if style not in REPLICATED_STYLES:
            known = (*COLUMN_STYLES, *ROW_STYLES, FUSED_STYLE, *REPLICATED_STYLES)
            raise ArgumentError(f"tp_plan: {name}", f"one of {', '.join(filter(None, known))}", str(style))
        return Load(prefixes)

    def split(self, name: str) -> ExpertSplit | None:
        """Return the split of the experts in the module `name` of the model."""
        style = _get_parameter_plan(name, self._styles, is_weight=False)
        if style not in (None, EXPERTS_STYLE):
            raise ArgumentError(f"tp_plan: {name}", EXPERTS_STYLE, str(style))
        return "tensor" if style == EXPERTS_STYLE else None

    def check(self, weights: Weights, layers: LayerMap) -> None:
        """Raise CutError or DivideError for a layer that cannot be split, before any weight is read.

        Layers that are quantized by the load are checked when they are loaded.
        """
        if self.ranks == 1 or isinstance(weights.loader, QuantizingLoader):
            return
        for name in (*layers.embeddings, *layers.matrices):
            style = _get_parameter_plan(name, self._styles, is_weight=name in layers.matrices)
            if style not in REPLICATED_STYLES:
                expected = "no style: every rank has the whole of this quantized matrix"
                raise ArgumentError(f"tp_plan: {name}", expected, str(style))
        for name, prefixes in layers.linears.items():
            load = self.load(name, prefixes)
            weights.loader.plan(weights, parts_of(weights, weights.loader, load), load.split)
        for name, prefix in layers.experts.items():
            plan_experts(weights, prefix, self.split(name))


class QloadQuantizer(HfQuantizer):  # type: ignore[misc]
    """Quantizer of transformers that loads the quantized layers; transformers loads the rest, biases too.

    Parameters
    ----------
    quantization_config
        The config given to `from_pretrained`, or one for the checkpoint's own.
    options
        Those of every quantizer of transformers.
    """

    def __init__(self, quantization_config: QloadConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.pre_quantized: bool = True  # transformers itself never quantizes
        self.config: QloadConfig = quantization_config
        self.dtype: torch.dtype = torch.get_default_dtype()
        self.device_map: Mapping[str, Any] | None = None
        self._files: Sequence[str] | None = None  # None: transformers finds them
        self._reader: CheckpointReader | None = None
        self._layers = LayerMap()
        self._plan: TensorParallelPlan | None = None
        self._facts: dict[str, ExpertFacts | None] = {}
        self._placeholders: list[PlaceholderLayer] = []

    def update_attn_implementation(self, config: Any) -> Any:
        """Add the name of a file with an unusual name to the model's `config`.

        transformers calls this before it looks for files.
        """
        files = config.__dict__.pop(FILES_KEY, None)
        if files is None and getattr(config, FILE_NAME_KEY, None) is None:
            files = nondefault_files(config.name_or_path)
        if files:
            self._files = files
            setattr(config, FILE_NAME_KEY, Path(files[0]).name)
        return config

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Store the `dtype` of activations that transformers has chosen, and keep it."""
        self.dtype = dtype
        return dtype

    def _process_model_before_weight_loading(
        self,
        model: Any,
        *,
        device_map: Any = None,
        checkpoint_files: list[str],
        **options: Any,
    ) -> None:
        """Find the quantized layers, check their split over ranks, and replace them by placeholders."""
        if self._files is None:
            check_files(checkpoint_files)
        else:
            add_files(checkpoint_files, self._files)
            model.config.__dict__.pop(FILE_NAME_KEY, None)
        names = ModelNames(model)
        self._reader = CheckpointReader(checkpoint_files, self.config, self.dtype, names.stack_order)
        try:
            self._prepare(model, names, self._reader, device_map)
        except BaseException:
            self._reader.close()
            raise

    def _prepare(self, model: Any, names: ModelNames, reader: CheckpointReader, device_map: Any) -> None:
        reader.check_all_read()
        self._plan = TensorParallelPlan(model)
        refuse_adapters(name for name in reader.groups.names if not is_adapter(name) or not names.of(name))
        tied = {key.removesuffix(".weight") for key in model.all_tied_weights_keys}
        found, stacks = reader.groups.found, reader.stacks
        layers = map_layers(model, names, found, stacks, reader.is_quantized, reader.will_be_quantized)
        for head, table in model.all_tied_weights_keys.items():
            embedding = layers.embeddings.get(table.removesuffix(".weight"))
            if embedding is not None:
                layers.linears.setdefault(head.removesuffix(".weight"), (embedding,))
        if self.config.quantizer is not None:
            check_any_plain(reader, layers)
            linears = {name: prefix for name, prefix in layers.linears.items() if name not in tied}
            layers = replace(layers, linears=linears)
        check_plain_values(reader, names, layers)
        self._layers = layers
        known, given = reader.groups.weights.architecture, self.config.facts
        for name in layers.experts:
            module = model.get_submodule(name)
            facts = self._facts[name] = resolve_facts(name, module, known, given)
            if facts is None and self._plan.ranks > 1 and self._plan.split(name) is not None:
                check_sums(name, module)
        self._plan.check(reader.weights("cpu", Rank(0, self._plan.ranks), as_stored=True), layers)
        if layers.unplaced:
            model_name, text = type(model).__name__, list_names(layers.unplaced, MAX_LISTED_NAMES)
            log.warning("%d quantized layers have no place in %s: %s", len(layers.unplaced), model_name, text)
        read = {name for key in reader.read_names(layers) for name in names.unexpected(key)}
        ignored = model._keys_to_ignore_on_load_unexpected or set()
        model._keys_to_ignore_on_load_unexpected = {*ignored, *name_patterns(read)}
        self._replace(model, reader, reserving=isinstance(device_map, str))
        self._placeholders = [part for part in model.modules() if isinstance(part, PlaceholderLayer)]
        self._set_device_map(device_map)

    def _replace(self, model: Any, reader: CheckpointReader, reserving: bool) -> None:
        """Replace layers by placeholders, which count as their bytes while a device map is computed."""
        tables = {*self._layers.embeddings.values()}
        for name, prefixes in self._layers.linears.items():
            module = model.get_submodule(name)
            is_conv = hasattr(module, "nf")  # transformers' Conv1D
            K, N = (module.nx, module.nf) if is_conv else (module.in_features, module.out_features)
            bias = module.bias
            if bias is None and reader.groups.weights.has_tensor(named(prefixes[0], "bias")):
                bias = nn.Parameter(torch.empty(N, dtype=self.dtype, device="meta"), requires_grad=False)
            slot = LinearSlot(K, N, bias, self.dtype)
            slot.is_tied = not tables.isdisjoint(prefixes)
            model.set_submodule(name, slot)
            model.all_tied_weights_keys.pop(f"{name}.weight", None)  # the checkpoint stores an untied head
            if reserving:
                slot.reserve(sum(map(reader.nbytes, prefixes)))
        for name, prefix in self._layers.experts.items():
            module = model.get_submodule(name)
            typed: PlaceholderLayer = (
                replace_stacks(module, class_stacks(name, module))
                if self._facts[name] is None
                else replace_experts(name, module)
            )
            if reserving:
                typed.reserve(reader.nbytes(prefix))
        for name, prefix in self._layers.embeddings.items():
            rows = replace_table(model.get_submodule(name), self.dtype)
            if reserving:
                rows.reserve(reader.nbytes(prefix))
        for name, prefix in self._layers.matrices.items():
            owner, _, parameter = name.rpartition(".")
            matrix = replace_matrix(model.get_submodule(owner), parameter, self.dtype)
            if reserving:
                matrix.reserve(reader.nbytes(prefix))

    def validate_environment(self, *arguments: Any, device_map: Any = None, **options: Any) -> None:
        """Store the device map; called before there is a model, and again once the map is computed."""
        if self._reader is not None:
            self._set_device_map(device_map)

    def _set_device_map(self, device_map: Any) -> None:
        if isinstance(device_map, Mapping):
            self.device_map = device_map
            for placeholder in self._placeholders:
                placeholder.release()
            check_device_map(device_map, self._layers.names)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> None:
        """Fill the placeholders, on the devices of the device map."""
        assert self._reader is not None
        assert self._plan is not None
        try:
            group: ProcessGroup = ALONE
            if self._plan.ranks > 1:
                group = model._mesh_manager.get_mesh("tp").get_group()
            loaded = self._reader.loaded(self._layers)
            self._fill(model, self._reader, group, layer_devices(model, self.device_map, self._layers.names))
        finally:
            self._reader.close()
            self._reader = None
        model.num_parameters = partial(num_parameters, model)
        if self._is_saved_by_copy:
            model.save_pretrained = partial(save_model, model, loaded)
        refuse_casts(model, self.dtype)

    def _fill(
        self,
        model: nn.Module,
        reader: CheckpointReader,
        group: ProcessGroup,
        places: Mapping[str, LayerDevice],
    ) -> None:
        """Load every layer to its device, for this rank of a `group`; `places`: by names of placeholders."""
        assert self._plan is not None
        plan = self._plan
        for device in dict.fromkeys(place.device for place in places.values()):
            weights = reader.weights(device, group)
            names = {name for name, place in places.items() if place.device == device}
            for name, weight in self._load_linears(weights, plan, names):
                slot = model.get_submodule(name)
                assert isinstance(slot, LinearSlot)
                check_shape(
                    weight.layer.name or name, weight.layer.whole, (slot.out_features, slot.in_features)
                )
                bias = None if self.config.make is None else slot.bias
                linear = self._make_linear(weight, bias, maximum_for(weight.layer, group))
                if bias is not None:
                    slot.bias = None
                slot.fill(linear, device)
                offload_if_mapped(linear, places[name])
            for name in self._layers.experts.keys() & names:
                self._fill_experts(name, model.get_submodule(name).typed_experts, weights, places[name])
            for name in self._layers.embeddings.keys() & names:
                table: Any = model.get_submodule(name).quantized_rows
                stored = reader.weights(device, ALONE, as_stored=True)
                rows = QuantizedRows(stored.get_weights(self._layers.embeddings[name]))
                check_shape(name, rows.typed.layer.whole, table.shape)
                table.fill(rows)
                offload_if_mapped(rows, places[name])
            for name, prefix in self._layers.matrices.items():
                owner, _, parameter = name.rpartition(".")
                if owner in names:
                    matrix: Any = getattr(model.get_submodule(owner), f"quantized_{parameter}")
                    weight = reader.weights(device, ALONE).get_weights(prefix)
                    check_shape(name, weight.layer.whole, matrix.shape)
                    linear = self._make_linear(weight, None, None)
                    matrix.fill(linear)
                    offload_if_mapped(linear, places[owner])

    def _fill_experts(self, name: str, typed: Any, weights: Weights, place: LayerDevice) -> None:
        """Load the experts of the module `name` into its placeholder."""
        assert self._plan is not None
        prefix, split, facts = self._layers.experts[name], self._plan.split(name), self._facts[name]
        experts = load_experts(weights, prefix, split, None, facts, computed=False)
        down, activations = experts.down.layer, self.config.activations
        check_shape(prefix, (experts.shape[0], *down.whole), typed.shape)
        maximum = maximum_for(down, weights.process_group) if split == "tensor" else None
        if isinstance(typed, ClassExperts):
            check_shape(prefix, experts.gate_up.layer.whole, typed.first_shape)
            check_inputs(experts, activations, maximum)
            typed.fill(experts, self._make_linear, maximum)
            for layer in typed.linears():
                offload_if_mapped(layer, place)
            return
        if self.config.make_experts is None:
            linear = experts.get_linear(activations=activations, maximum=maximum)
        else:
            linear = self.config.make_experts(experts, maximum)
        typed.fill(linear)
        offload_if_mapped(linear, place)

    def _make_linear(self, weight: Weight, bias: Tensor | None, maximum: Maximum) -> nn.Module:
        """Make the module of a layer; without a factory in the config it has no `bias`."""
        if self.config.make is not None:
            return self.config.make(weight, bias, maximum)
        return weight.get_linear(activations=self.config.activations, maximum=maximum, dtype=self.dtype)

    def _load_linears(
        self, weights: Weights, plan: TensorParallelPlan, names: set[str]
    ) -> Iterator[tuple[str, Weight]]:
        linears = self._layers.linears.items()
        loads = {plan.load(name, prefix): name for name, prefix in linears if name in names}
        if weights.device.type != "cpu":
            for load, weight in weights.stream(loads):
                yield loads[load], weight
            return
        # On the CPU, prefetching takes twice the time, and a third of the model in memory.
        for load, name in loads.items():
            yield name, weights.loader.load(weights, parts_of(weights, weights.loader, load), load.split)

    @property
    def _is_saved_by_copy(self) -> bool:
        """True if the load has neither quantized nor shared a layer."""
        return self.config.quantizer is None and self._plan is not None and self._plan.ranks == 1

    def is_serializable(self) -> bool:
        """Return whether `save_model` writes the model: all its quantized tensors are in the checkpoint."""
        if self._is_saved_by_copy:
            return True
        log.warning(
            "save_pretrained is refused: weights were quantized by the load, or are a rank's share; the "
            "checkpoint that they were loaded from is the one to keep"
        )
        return False

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Raise ArgumentError: a checkpoint can be dequantized, a loaded model cannot."""
        expected = "a folder, `qload convert PATH --to bf16 -o DIR`, to load"
        raise ArgumentError("dequantize", expected, "a loaded model")

    @property
    def is_trainable(self) -> bool:
        """True: gradients reach inputs, biases and adapters; quantized weights are not parameters."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: torch.compile sees a layer as one operator."""
        return True


def check_shape(name: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise ShapeError for a layer with another shape, (N, K) or (E, H, I), than in the model."""
    if stored != expected:
        axes = "(N, K)" if len(expected) == 2 else "(E, H, I)"
        raise ShapeError(name, f"{expected} = {axes}, as the model has it", stored)


def num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Count a model's parameters, with N times K of the whole layer for a quantized matrix."""
    count: int = PreTrainedModel.num_parameters(model, only_trainable, exclude_embeddings)
    if only_trainable:
        return count
    for module in model.modules():
        is_counted = isinstance(module, PlaceholderLayer) and not module.is_tied
        if is_counted and not (exclude_embeddings and isinstance(module, EmbeddingRows)):
            count += module.numel
    return count


def check_sums(name: str, module: nn.Module) -> None:
    """Raise ArgumentError if outputs of experts that their class computes are no sums over the ranks."""
    is_sum = is_dispatched_by_config(module) and not getattr(module, "has_post_expert_norm", True)
    if not is_sum:
        expected = f"no split: {type(module).__name__} computes more than a sum over the ranks"
        raise ArgumentError(f"tp_plan: {name}", expected, EXPERTS_STYLE)


def class_stacks(name: str, module: nn.Module) -> tuple[str, str]:
    """Return the stacks of experts that their class computes; UnsupportedFormatError for biased ones."""
    stacks = expert_stacks(module)
    assert stacks is not None
    if any(module._parameters.get(bias) is not None for bias in BIASES):
        raise UnsupportedFormatError(name, f"the gate of {type(module).__name__}, with biases, is unknown")
    return stacks


def check_any_plain(reader: CheckpointReader, layers: LayerMap) -> None:
    """Raise ArgumentError if the load would quantize no layer."""
    leads = tuple(f"{prefix}." for prefix in layers.experts.values())
    experts = (prefix for prefix in reader.groups.found if prefix.startswith(leads))
    prefixes = [*layers.layer_prefixes, *experts]
    if not any(map(reader.will_be_quantized, prefixes)):
        stored = sum(map(reader.is_quantized, prefixes))
        expected = "a checkpoint and a policy with plain layers to quantize"
        raise ArgumentError("quantizer", expected, f"none of them; {stored} layers are stored quantized")


def check_plain_values(reader: CheckpointReader, names: ModelNames, layers: LayerMap) -> None:
    """Raise UnreadTensorsError for quantized tensors that transformers would load as plain values.

    transformers loads plain floats, and integers of its own model.
    """
    read = {*reader.layer_tensor_names(layers)}
    infos = {
        name: info
        for name, info in reader.infos().items()
        if name not in read and info.stored_dtype not in FLOATS and names.is_float(name)
    }
    if infos:
        dtypes = {name: str(info.dtype).removeprefix("torch.") for name, info in infos.items()}
        reason = "and no format reads it; transformers would take its codes for values"
        unread = {name: f"it is stored as {dtype}, {reason}" for name, dtype in dtypes.items()}
        raise UnreadTensorsError(unread, sum(info.nbytes for info in infos.values()))
