"""`load`, `install` for transformers' own `from_pretrained`, and the check of transformers' version."""

import warnings
from collections.abc import Mapping
from copy import copy
from importlib import import_module
from os import PathLike
from typing import Any

import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from qload.detect import Target
from qload.detect.methods import METHODS
from qload.engines.transformers.checkpoint import (
    FILE_NAME_KEY,
    FILES_KEY,
    folder_and_files,
    missing_files_as_storage_error,
)
from qload.engines.transformers.config import METHOD, QloadConfig
from qload.engines.transformers.quantizer import QloadQuantizer
from qload.errors import ArgumentError, MissingTensorError, check_type
from qload.experts import ExpertFacts
from qload.kernels.declared import Activations
from qload.kernels.dtypes import DTYPES
from qload.loader.source import Nonfinite

TRIED = ("5.23.0",)
MAX_LISTED_NAMES = 5
INSTALLED_METHODS = (
    *METHODS,
    "bitsandbytes_4bit",
    "bitsandbytes_8bit",
)  # transformers' names for bitsandbytes
CONFIG_OPTIONS = (  # options of `from_pretrained` that apply to the config too
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)

# Functions and attributes of transformers that qload calls or overrides, public or not, by module.
HOOKS: Mapping[str, tuple[str, ...]] = {
    "transformers": ("AutoConfig", "CONFIG_MAPPING", "GenerationConfig", "LogitsProcessor"),
    "transformers.activations": ("ACT2FN",),
    "transformers.conversion_mapping": ("get_model_conversion_mapping",),
    "transformers.core_model_loading": (
        "Concatenate",
        "Interleave",
        "MergeModulelist",
        "Transpose",
        "WeightConverter",
        "WeightRenaming",
        "rename_source_key",
        "revert_weight_conversion",
    ),
    "transformers.distributed.configuration_utils": ("DistributedConfig",),
    "transformers.distributed.parallel_utils": ("_get_parameter_plan",),
    "transformers.integrations.moe": ("ALL_EXPERTS_FUNCTIONS", "_default_apply_gate"),
    "transformers.modeling_utils": (
        "PreTrainedModel.num_parameters",
        "PreTrainedModel.save_pretrained",
        "remove_tied_weights_from_state_dict",
    ),
    "transformers.quantizers.auto": ("AUTO_QUANTIZATION_CONFIG_MAPPING", "AUTO_QUANTIZER_MAPPING"),
    "transformers.quantizers.base": (
        "HfQuantizer._process_model_after_weight_loading",
        "HfQuantizer._process_model_before_weight_loading",
        "HfQuantizer.update_attn_implementation",
        "HfQuantizer.update_parallel_plan",
        "HfQuantizer.validate_environment",
    ),
    "transformers.utils.quantization_config": ("QuantizationConfigMixin.to_dict",),
}

_replaced_configs: dict[str, Any] = {}  # transformers' config classes, None for a method without one


def check_version() -> None:
    """Warn about an untested version of transformers; ArgumentError for one without a name in `HOOKS`."""
    version, tried = transformers.__version__, ", ".join(TRIED)
    for module, name in ((module, name) for module, names in HOOKS.items() for name in names):
        try:
            value: object = import_module(module)
            for part in name.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError):
            expected = f"{module}.{name}, as version {tried} has it"
            raise ArgumentError("transformers", expected, f"version {version}") from None
    if version not in TRIED:
        warnings.warn(f"qload was tried with transformers {tried}, and this is {version}", stacklevel=2)


def register() -> None:
    """Register the method "qload" with transformers, in addition to its own."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, QloadConfig)
    AUTO_QUANTIZER_MAPPING.setdefault(METHOD, QloadQuantizer)


def install(
    *,
    target: Target | None = "auto",
    activations: Activations = "declared",
    nonfinite: Nonfinite = "error",
    facts: ExpertFacts | None = None,
) -> None:
    """Let transformers' `from_pretrained` load every quantized checkpoint by qload.

    Applies to checkpoints whose `config.json` names a method that qload reads; `load` also reads those with
    the quantization config in a file of its own. A second call replaces the first.

    Parameters
    ----------
    target, activations, nonfinite, facts
        Those of `QloadConfig`.
    """
    settings: dict[str, Any] = {
        "target": target,
        "activations": activations,
        "nonfinite": nonfinite,
        "facts": facts,
    }
    QloadConfig(**settings)  # invalid settings are refused by this call, and not by a later load
    uninstall()

    class InstalledConfig(QloadConfig):
        """Config of a checkpoint, with the settings of `install`."""

        @classmethod
        def from_dict(cls, section: Mapping[str, Any], *rest: Any, **options: Any) -> Any:
            """Create the config for a checkpoint with this `quantization_config`."""
            return QloadConfig.of_checkpoint(section, **settings)

    for method in INSTALLED_METHODS:
        _replaced_configs[method] = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
        AUTO_QUANTIZATION_CONFIG_MAPPING[method] = InstalledConfig


def uninstall() -> None:
    """Undo `install`: restore transformers' own loaders."""
    for method, config in _replaced_configs.items():
        if config is None:
            del AUTO_QUANTIZATION_CONFIG_MAPPING[method]
        else:
            AUTO_QUANTIZATION_CONFIG_MAPPING[method] = config
    _replaced_configs.clear()


def load(
    path: str | PathLike[str],
    *,
    target: Target | None = "auto",
    activations: Activations = "declared",
    nonfinite: Nonfinite = "error",
    facts: ExpertFacts | None = None,
    dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    tp_plan: Any = None,
    model_class: Any = None,
    quantization_config: QloadConfig | None = None,
    **options: Any,
) -> Any:
    """Load a transformers model, with its quantized layers by qload, as `from_pretrained` does.

    Parameters
    ----------
    path
        A folder, a file or an index in one, or a model's name on the hub. Files are found as in
        `open_checkpoint`; on the hub transformers finds them, by their default names.
    target, activations, nonfinite, facts
        Those of `QloadConfig`.
    dtype
        Of activations and plain floats; None: as the checkpoint says.
    device_map
        As in `from_pretrained`: "auto", a device, or a map from modules to devices. Layers on "cpu", in a map
        with another device, are copied to that device for each call; ArgumentError for a quantized layer on
        "disk".
    tp_plan
        "auto": the ranks of torch.distributed split the model by transformers' plan for it. CutError or
        DivideError on all of them, before a weight is read, for a layer that cannot be split.
    model_class
        Class whose `from_pretrained` is called; None: the class that the config names, or
        `AutoModelForCausalLM`.
    quantization_config
        A `QloadConfig` whose quantizer quantizes plain layers by the load, with its own `target`,
        `activations`, `nonfinite` and `facts`.
    options
        Further options of `from_pretrained`.

    Raises
    ------
    ArgumentError
        For an unsupported value of a parameter.
    MissingTensorError
        For a tensor of the model that the checkpoint lacks; transformers would initialize it at random.
    UnreadTensorsError
        For a tensor that no format reads, before any weight is read.
    QloadError
        As in `open_checkpoint` and the loads of layers.
    """
    register()
    check_type("path", path, str | PathLike)
    check_type("quantization_config", quantization_config, QloadConfig | None)
    dtype = one_dtype(dtype, options.pop("torch_dtype", None))
    check_dtype(dtype)
    check_plan(tp_plan, options)
    qload_config = quantization_config or QloadConfig(
        target=target, activations=activations, nonfinite=nonfinite, facts=facts
    )
    folder, files = folder_and_files(path, options)
    given = options.pop("config", None)
    if given:
        config = copy(given)
    else:
        fetch = {name: options[name] for name in CONFIG_OPTIONS if name in options}
        config = transformers.AutoConfig.from_pretrained(folder, **fetch)
    if getattr(config, FILE_NAME_KEY, None) is None:
        setattr(config, FILES_KEY, files)
    if tp_plan is not None:
        options["distributed_config"] = DistributedConfig(tp_plan=tp_plan)
    section = getattr(config, "quantization_config", None)
    if qload_config.quantizer is None:
        qload_config.checkpoint = section if isinstance(section, dict) else None
    config.quantization_config = {**qload_config.as_section(), "quant_method": METHOD}
    cls = model_class or class_of(config)
    wants_info = options.pop("output_loading_info", False)
    with missing_files_as_storage_error(path):
        model, info = cls.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            device_map=device_map,
            output_loading_info=True,
            **options,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        hint = f"{len(missing)} tensors of {cls.__name__}"
        raise MissingTensorError(missing[0], missing[:MAX_LISTED_NAMES], [], hint)
    return (model, info) if wants_info else model


def one_dtype(dtype: Any, other: Any) -> Any:
    """Return `dtype`, or `torch_dtype`, its old name; ArgumentError for two different values."""
    if dtype is None or other is None or dtype == other:
        return other if dtype is None else dtype
    raise ArgumentError("torch_dtype", f"{dtype}, as dtype says", str(other))


def check_dtype(dtype: Any) -> None:
    """Raise ArgumentError for activations of an unsupported `dtype`, a torch.dtype or the name of one."""
    value = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto") and value not in DTYPES:
        expected = "None, 'auto', torch.float16, torch.bfloat16 or torch.float32"
        raise ArgumentError("dtype", expected, repr(dtype))


def check_plan(tp_plan: Any, options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for an invalid `tp_plan`, or a second one in the `options` of transformers."""
    if tp_plan is None:
        return
    if tp_plan != "auto" and not isinstance(tp_plan, Mapping):
        raise ArgumentError("tp_plan", "None, 'auto', or styles by names of layers", repr(tp_plan))
    if options.get("distributed_config") is not None:
        expected = "one of the two: a DistributedConfig has a tp_plan of its own"
        raise ArgumentError("tp_plan", expected, "tp_plan and distributed_config")


def class_of(config: Any) -> Any:
    """Return the first class that a config names, if transformers has it; else `AutoModelForCausalLM`."""
    cls = getattr(transformers, str(next(iter(config.architectures or ()), "")), None)
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    return cls if is_model else transformers.AutoModelForCausalLM


register()
