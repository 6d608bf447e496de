"""The quantizer that transformers calls: slots before it loads, weights after, nothing in between."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.distributed.parallel_utils import _get_parameter_plan
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from qload.architecture.adapters import is_adapter, refuse_adapters
from qload.engines.transformers.checkpoint import FOUND, NAME, Source, check_files, complete, unusual_files
from qload.engines.transformers.config import QloadConfig
from qload.engines.transformers.layer_names import ModelNames, Places, patterns, places_of
from qload.engines.transformers.placeholder_layers import (
    LinearSlot,
    TypedExperts,
    refuse_casts,
    settled_facts,
    take_over,
)
from qload.errors import ArgumentError, ShapeError, UnreadTensorsError
from qload.experts import ExpertFacts, ExpertSplit
from qload.experts.load import plan_experts
from qload.formats.unquantized import FLOATS
from qload.kernels.declared import Activations
from qload.methods.loaded import maximum_for
from qload.parallel import ALONE, ProcessGroup, Rank
from qload.quantize import QuantizingLoader
from qload.spec import Weight, named
from qload.weights import Load, Weights
from qload.weights.loads import parts_of


def num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """How many numbers the layers of a model mean: of a quantized matrix N times K of the whole layer."""
    count: int = PreTrainedModel.num_parameters(model, only_trainable, exclude_embeddings)
    if only_trainable:
        return count
    for module in model.modules():
        if isinstance(module, LinearSlot):
            count += module.out_features * module.in_features
        elif isinstance(module, TypedExperts):
            count += module.count
    return count


def count_truly(model: Any) -> None:
    """Let `model.num_parameters()`, and that of copies, count quantized layers.

    The memory footprint counts buffers as it is.
    """
    model.num_parameters = partial(num_parameters, model)


CPU = torch.device("cpu")


@dataclass(frozen=True)
class SlotPlace:
    """Where a layer multiplies; `away`: its tensors wait on the CPU, and come for each product."""

    device: torch.device
    away: bool = False


def check_map(device_map: Mapping[str, Any], names: Iterable[str]) -> None:
    """ArgumentError where a map puts one of the layers `names` on a disk, or on the device without bytes."""
    for name in names:
        said = str(entry(device_map, name))
        if said in ("disk", "meta"):
            expected = "a device or 'cpu' for each quantized layer: tensors do not wait on a disk"
            raise ArgumentError("device_map", expected, f"{said!r} for {name}")


def entry(device_map: Mapping[str, Any], name: str) -> Any:
    """What the map says of the module `name`: of the longest run of its segments that it has; or None."""
    segments = name.split(".")
    for count in range(len(segments), -1, -1):
        found = device_map.get(".".join(segments[:count]))
        if found is not None:
            return found
    return None


def places_in(model: Any, device_map: Mapping[str, Any] | None, names: Iterable[str]) -> dict[str, SlotPlace]:
    """Where each of the modules `names` multiplies, once the model is dispatched.

    A model that goes to one device has no hooks; of one that goes to several the hooks say where it runs.
    """
    dispatched: Mapping[str, Any] = getattr(model, "hf_device_map", {})
    if not dispatched:
        return {name: SlotPlace(_device(entry(device_map or {}, name))) for name in names}
    found = {}
    for name in names:
        runs = _device(_hooked(model, name))
        found[name] = SlotPlace(runs, away=entry(dispatched, name) == "cpu" and str(runs) != "cpu")
    return found


def keep_away(linear: nn.Module, place: SlotPlace) -> None:
    """Let the tensors of a layer wait on the CPU, where its place says so, and come for each product."""
    if not place.away:
        return
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    linear.to("cpu")
    add_hook_to_module(linear, AlignDevicesHook(place.device, offload=True, offload_buffers=True))


def _hooked(model: nn.Module, name: str) -> Any:
    """Where the hook of a module, or of the nearest that it is in, makes it run."""
    segments = name.split(".")
    for count in range(len(segments), -1, -1):
        hook = getattr(model.get_submodule(".".join(segments[:count])), "_hf_hook", None)
        hooks = getattr(hook, "hooks", (hook,))
        device = next(filter(None, (getattr(each, "execution_device", None) for each in hooks)), None)
        if isinstance(device, Mapping):
            device = entry(device, name)
        if device is not None:
            return device
    return None


def _device(said: Any) -> torch.device:
    if said is None:
        return CPU
    if isinstance(said, int):
        kind = torch.accelerator.current_accelerator()
        return torch.device("cuda" if kind is None else kind.type, said)
    return torch.device(said)


COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output")
ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input")
PACKED = "packed_colwise"  # gate and up in one layer, each cut for itself
WHOLE = (None, "mla_kv_a_proj", "replicate", "replicated_with_grad_allreduce", "local_params")
EXPERTS = "moe_tp_experts"
OTHERWISE = {  # ways of transformers to use ranks
    "ep_size": "ranks have a share of each expert",
    "fsdp_size": "quantized weights are no parameters that could be gathered",
    "dp_replicate_size": "quantized weights are no parameters that could be gathered",
    "pp_size": "every rank has a share of every layer",
}


class SharingPlan:
    """How the ranks share the layers of a model.

    ArgumentError for experts of which ranks have whole ones, as transformers then sends tokens among ranks,
    and for ranks that share parameters or have layers of their own.

    Parameters
    ----------
    model
        As transformers made it.
    """

    def __init__(self, model: Any) -> None:
        said = getattr(model.config, "distributed_config", None)
        self.ranks: int = 1 if said is None else said.tp_size
        own = dict(model.tp_plan or {}) if self.ranks > 1 else {}
        asked = getattr(said, "tp_plan", None)
        self._styles: Mapping[str, str] = own | (asked if isinstance(asked, dict) else {})
        for name, why in OTHERWISE.items():
            size = getattr(said, name, None) or 1
            if size > 1:
                raise ArgumentError(name, f"1: {why}", str(size))

    def load(self, name: str, prefix: str) -> Load:
        """The load of the layer `prefix` that stands as `name` in the model."""
        style = _get_parameter_plan(name, self._styles, is_weight=False)
        if style in COLUMNS:
            return Load(prefix, "N")
        if style in ROWS:
            return Load(prefix, "K")
        if style == PACKED:
            return Load(prefix, "N", block_sizes=2)
        if style not in WHOLE:
            lawful = ", ".join(filter(None, (*COLUMNS, *ROWS, PACKED, *WHOLE)))
            raise ArgumentError(f"tp_plan: {name}", f"one of {lawful}", str(style))
        return Load(prefix)

    def split(self, name: str) -> ExpertSplit | None:
        """How the ranks share the experts that stand as `name` in the model."""
        style = _get_parameter_plan(name, self._styles, is_weight=False)
        if style not in (None, EXPERTS):
            raise ArgumentError(f"tp_plan: {name}", EXPERTS, str(style))
        return "tensor" if style == EXPERTS else None

    def check(self, weights: Weights, places: Places) -> None:
        """CutError or DivideError where the ranks cannot share a layer; no weight is read.

        Of layers that are quantized while they are loaded, each is checked when it is loaded.
        """
        if self.ranks == 1 or isinstance(weights.loader, QuantizingLoader):
            return
        for name, prefix in places.linears.items():
            load = self.load(name, prefix)
            weights.loader.plan(weights, parts_of(weights, weights.loader, load), load.split)
        for name, prefix in places.experts.items():
            plan_experts(weights, prefix, self.split(name))


@dataclass(frozen=True)
class Filling:
    """What slots are filled from, and how.

    Attributes
    ----------
    source
        The checkpoint.
    places, plan
        Which layers, and which share of each.
    group
        The ranks that share them.
    activations
        Whether inputs are quantized where the checkpoint declares it.
    facts
        What the experts of each place do between their matrices.
    """

    source: Source
    places: Places
    plan: SharingPlan
    group: ProcessGroup
    activations: Activations
    facts: Mapping[str, ExpertFacts]

    def fill(self, model: nn.Module, where: Mapping[str, SlotPlace]) -> None:
        """Load every layer to where it multiplies; the errors of its load. `where`: by a slot's name."""
        for device in dict.fromkeys(place.device for place in where.values()):
            weights = self.source.weights(device, self.group)
            here = {name for name, place in where.items() if place.device == device}
            for name, weight in self._linears(weights, here):
                slot = model.get_submodule(name)
                assert isinstance(slot, LinearSlot)
                self._fill_linear(name, slot, weight, where[name])
            for name in self.places.experts.keys() & here:
                self._fill_experts(name, model.get_submodule(name), weights, where[name])

    def _linears(self, weights: Weights, here: set[str]) -> Iterator[tuple[str, Weight]]:
        names: dict[Load, str] = {
            self.plan.load(name, prefix): name for name, prefix in self.places.linears.items() if name in here
        }
        if weights.device.type != "cpu":
            for load, weight in weights.stream(names):
                yield names[load], weight
            return
        # Reading ahead costs twice the time here, and a third of the model in memory.
        for load, name in names.items():
            yield name, weights.loader.load(weights, parts_of(weights, weights.loader, load), load.split)

    def _fill_linear(self, name: str, slot: LinearSlot, weight: Weight, place: SlotPlace) -> None:
        whole, expected = weight.layer.whole, (slot.out_features, slot.in_features)
        if whole != expected:
            raise ShapeError(weight.layer.name or name, f"{expected} = (N, K), as the model has it", whole)
        maximum = maximum_for(weight.layer, self.group)
        linear = weight.get_linear(activations=self.activations, maximum=maximum, dtype=self.source.dtype)
        slot.fill(linear, place.device)
        keep_away(linear, place)

    def _fill_experts(self, name: str, module: Any, weights: Weights, place: SlotPlace) -> None:
        typed: TypedExperts = module.typed_experts
        prefix, split = self.places.experts[name], self.plan.split(name)
        loaded = weights.get_experts(prefix, split=split, facts=self.facts[name])
        whole = (loaded.shape[0], *loaded.down.layer.whole)
        if typed.shape != whole:
            raise ShapeError(prefix, f"{typed.shape} = (E, H, I), as the model has it", whole)
        maximum = maximum_for(loaded.down.layer, self.group) if split == "tensor" else None
        linear = loaded.get_linear(activations=self.activations, maximum=maximum)
        typed.fill(linear)
        keep_away(linear, place)


def on_meta(model: nn.Module) -> Iterator[str]:
    """The names of the parameters and buffers that nothing has filled."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device == torch.device("meta"):
            yield name


log: logging.Logger = logging.getLogger("qload")

SHOWN = 5  # names in a message


class QloadQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads the quantized layers of a checkpoint by qload; transformers loads all the rest, biases too.

    Parameters
    ----------
    quantization_config
        What `from_pretrained` was handed, or made of the checkpoint's own.
    options
        Those of every quantizer of transformers.
    """

    def __init__(self, quantization_config: QloadConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.pre_quantized: bool = True  # to transformers, which has nothing to quantize either way
        self.config: QloadConfig = quantization_config
        self.dtype: torch.dtype = torch.get_default_dtype()
        self.device_map: Mapping[str, Any] | None = None
        self._files: Sequence[str] | None = None  # None: transformers finds them
        self._source: Source | None = None
        self._places = Places()
        self._plan: SharingPlan | None = None
        self._facts: dict[str, ExpertFacts] = {}
        self._slots: list[LinearSlot | TypedExperts] = []

    def update_attn_implementation(self, config: Any) -> Any:
        """The model's `config`, with the name of a file that transformers would not find by itself.

        transformers calls this before it looks for files.
        """
        files = config.__dict__.pop(FOUND, None)
        if files is None and getattr(config, NAME, None) is None:
            files = unusual_files(config.name_or_path)
        if files:
            self._files = files
            setattr(config, NAME, Path(files[0]).name)
        return config

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The `dtype` of activations that transformers has settled on, which is the same for qload."""
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
        """Find the layers, check how ranks share them, and put slots where they go."""
        if self._files is None:
            check_files(checkpoint_files)
        else:
            complete(checkpoint_files, self._files)
            model.config.__dict__.pop(NAME, None)
        self._source = Source(checkpoint_files, self.config, self.dtype)
        try:
            self._prepare(model, self._source, device_map)
        except BaseException:
            self._source.close()
            raise

    def _prepare(self, model: Any, source: Source, device_map: Any) -> None:
        source.check_all_read()
        names, self._plan = ModelNames(model), SharingPlan(model)
        refuse_adapters(name for name in source.groups.names if not is_adapter(name) or not names.of(name))
        tied = {key.removesuffix(".weight") for key in model.all_tied_weights_keys}
        places = places_of(model, names, source.groups.found, source.is_quantized, source.will_be_quantized)
        if self.config.quantizer is not None:
            check_plain(source, places)
            linears = {name: prefix for name, prefix in places.linears.items() if name not in tied}
            places = replace(places, linears=linears)
        check_values(source, names, places)
        self._places = places
        known, given = source.groups.weights.architecture, self.config.facts
        for name in places.experts:
            self._facts[name] = settled_facts(name, model.get_submodule(name), known, given)
        self._plan.check(source.weights("cpu", Rank(0, self._plan.ranks), as_stored=True), places)
        self._tell_nowhere(model)
        self._silence(model, names)
        self._replace(model, reserving=isinstance(device_map, str))
        self._slots = [each for each in model.modules() if isinstance(each, LinearSlot | TypedExperts)]
        self._take_map(device_map)

    def _replace(self, model: Any, reserving: bool) -> None:
        """Slots for the layers, which stand for their bytes while a device map is made."""
        assert self._source is not None
        for name, prefix in self._places.linears.items():
            module = model.get_submodule(name)
            K, N = _sizes(module)
            stored = self._source.groups.weights.has_tensor(named(prefix, "bias"))
            bias = module.bias
            if stored and bias is None:  # of what the checkpoint stores nothing is left out
                bias = nn.Parameter(torch.empty(N, dtype=self.dtype, device="meta"), requires_grad=False)
            slot = LinearSlot(K, N, bias, self.dtype)
            model.set_submodule(name, slot)
            model.all_tied_weights_keys.pop(f"{name}.weight", None)  # the checkpoint has a head of its own
            if reserving:
                slot.reserve(self._source.nbytes(prefix))
        for name, prefix in self._places.experts.items():
            typed = take_over(name, model.get_submodule(name))
            if reserving:
                typed.reserve(self._source.nbytes(prefix))

    def validate_environment(self, *arguments: Any, device_map: Any = None, **options: Any) -> None:
        """Called once before there is a model, and once more with the device map that was made for it."""
        if self._source is not None:
            self._take_map(device_map)

    def _take_map(self, device_map: Any) -> None:
        if isinstance(device_map, Mapping):
            self.device_map = device_map
            for slot in self._slots:
                slot.release()
            check_map(device_map, [*self._places.linears, *self._places.experts])

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> None:
        """Fill the slots, on the devices that transformers chose."""
        assert self._source is not None
        assert self._plan is not None
        slots = [*self._places.linears, *self._places.experts]
        try:
            group = _group(model) if self._plan.ranks > 1 else ALONE
            inputs = self.config.activations
            filling = Filling(self._source, self._places, self._plan, group, inputs, self._facts)
            filling.fill(model, places_in(model, self.device_map, slots))
        finally:
            self._source.close()
            self._source = None
        count_truly(model)
        refuse_casts(model, self.dtype)

    def _tell_nowhere(self, model: Any) -> None:
        nowhere = self._places.nowhere
        if nowhere:
            more = f" and {len(nowhere) - SHOWN} more" if nowhere[SHOWN:] else ""
            text = "%d quantized layers have no place in %s: %s"
            log.warning(text, len(nowhere), type(model).__name__, ", ".join(nowhere[:SHOWN]) + more)

    def _silence(self, model: Any, names: ModelNames) -> None:
        """Tell transformers which of the tensors that it finds no place for are qload's."""
        assert self._source is not None
        ours = self._source.names(self._places)
        known = {found for key in ours for found in names.unexpected(key)}
        before = model._keys_to_ignore_on_load_unexpected or set()
        model._keys_to_ignore_on_load_unexpected = {*before, *patterns(known)}

    def is_serializable(self) -> bool:
        """False: a model is saved by who quantizes it; what is loaded here may be repacked for a kernel."""
        log.warning(
            "save_pretrained is refused: weights are in the order of a kernel, or a rank's share; the "
            "checkpoint that they were loaded from is the one to keep"
        )
        return False

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """ArgumentError: what stands in the model is a kernel's; files are dequantized."""
        expected = "a folder, `qload convert PATH --to bf16 -o DIR`, which is then loaded"
        raise ArgumentError("dequantize", expected, "a model that is loaded")

    @property
    def is_trainable(self) -> bool:
        """True: gradients reach inputs, biases and adapters; quantized weights are no parameters."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: a layer is one operator to torch.compile."""
        return True


def check_plain(source: Source, places: Places) -> None:
    """ArgumentError where there is nothing to quantize while it is loaded."""
    leads = tuple(f"{lead}." for lead in places.experts.values())
    experts = (prefix for prefix in source.groups.found if prefix.startswith(leads))
    layers = [*places.linears.values(), *experts]
    if not any(map(source.will_be_quantized, layers)):
        stored = sum(map(source.is_quantized, layers))
        expected = "a checkpoint and a policy with plain layers to quantize"
        raise ArgumentError("quantizer", expected, f"none of them; {stored} layers are stored quantized")


def check_values(source: Source, names: ModelNames, places: Places) -> None:
    """Raise UnreadTensorsError for quantized tensors that transformers would load as plain values.

    Plain floats are left to transformers, and integers with a place for integers in its model.
    """
    ours = {*source.names_of_layers(places)}
    infos = {
        name: info
        for name, info in source.infos().items()
        if name not in ours and info.dtype not in FLOATS and names.is_float(name)
    }
    if infos:
        dtypes = {name: str(info.dtype).removeprefix("torch.") for name, info in infos.items()}
        why = "and no format says what its values are; transformers would take them as they are stored"
        unread = {name: f"it is stored as {dtype}, {why}" for name, dtype in dtypes.items()}
        raise UnreadTensorsError(unread, sum(info.nbytes for info in infos.values()))


def _sizes(module: Any) -> tuple[int, int]:
    """(K, N) of a linear layer, in either of transformers' two ways to store one."""
    return (module.nx, module.nf) if hasattr(module, "nf") else (module.in_features, module.out_features)


def _group(model: Any) -> ProcessGroup:
    """The ranks that share each layer, as transformers has made them."""
    group: ProcessGroup = model._mesh_manager.get_mesh("tp").get_group()
    return group
