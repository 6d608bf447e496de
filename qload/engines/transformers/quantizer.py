"""The quantizer that transformers calls: slots before it loads, weights after, nothing in between."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer

from qload.architecture.adapters import is_adapter, refuse_adapters
from qload.engines.transformers.config import QloadConfig
from qload.engines.transformers.counting import count_truly
from qload.engines.transformers.devices import check_map, places_in
from qload.engines.transformers.experts import TypedExperts, settled_facts, take_over
from qload.engines.transformers.files import FOUND, NAME, check_files, complete, unusual_files
from qload.engines.transformers.filling import Filling
from qload.engines.transformers.placing import ModelNames, Places, patterns, places_of
from qload.engines.transformers.shares import SharingPlan
from qload.engines.transformers.slots import LinearSlot, refuse_casts
from qload.engines.transformers.source import Source
from qload.errors import ArgumentError, UnreadTensorsError
from qload.experts import ExpertFacts
from qload.formats.unquantized import FLOATS
from qload.parallel import ALONE, ProcessGroup, Rank
from qload.spec import named

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
