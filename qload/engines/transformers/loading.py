"""`load`: a model of transformers from any checkpoint that qload reads."""

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
from qload.detect.config_reader import METHODS
from qload.engines.transformers.checkpoint import FOUND, NAME, folder_and_files, named_files
from qload.engines.transformers.config import METHOD, QloadConfig
from qload.engines.transformers.quantizer import QloadQuantizer
from qload.errors import ArgumentError, MissingTensorError, check_type
from qload.experts import ExpertFacts
from qload.kernels.declared import Activations
from qload.kernels.dtypes import DTYPES
from qload.loader.finite_scales import Nonfinite

# transformers has two names for bitsandbytes, by a flag.
READ = (*METHODS, "bitsandbytes_4bit", "bitsandbytes_8bit")

_before: dict[str, Any] = {}
_MISSING = object()


def register() -> None:
    """Make the method "qload" known to transformers, beside its own."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, QloadConfig)
    AUTO_QUANTIZER_MAPPING.setdefault(METHOD, QloadQuantizer)


def install(
    *,
    target: Target | None = "auto",
    activations: Activations = "declared",
    nonfinite: Nonfinite = "error",
    facts: ExpertFacts | None = None,
) -> None:
    """From here on transformers' `from_pretrained` loads every quantized checkpoint by qload.

    Of those whose `config.json` says that they are quantized, and by a method that qload reads; `load` takes
    also those of tools that say so in a file of their own. A second call replaces the first.

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
    QloadConfig(**settings)  # refused here, not when a model is loaded
    uninstall()

    class Installed(QloadConfig):
        """The config of a checkpoint, with the settings of `install`."""

        @classmethod
        def from_dict(cls, section: Mapping[str, Any], *rest: Any, **options: Any) -> Any:
            """The config for a checkpoint whose own section this is."""
            return QloadConfig.of_checkpoint(section, **settings)

    for method in READ:
        _before[method] = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method, _MISSING)
        AUTO_QUANTIZATION_CONFIG_MAPPING[method] = Installed


def uninstall() -> None:
    """Undo `install`: transformers' own loaders are back, and nothing else of it was changed."""
    for method, own in _before.items():
        if own is _MISSING:
            del AUTO_QUANTIZATION_CONFIG_MAPPING[method]
        else:
            AUTO_QUANTIZATION_CONFIG_MAPPING[method] = own
    _before.clear()


register()


SHOWN = 5  # names in a message


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
    """The model of a checkpoint, as transformers' `from_pretrained` makes it, its quantized layers qload's.

    Parameters
    ----------
    path
        A folder, a file or an index in one, or a model's name on the hub. Files are those that
        `open_checkpoint` finds; on the hub transformers finds them, by their usual names.
    target, activations, nonfinite, facts
        Those of `QloadConfig`.
    dtype
        Of activations and plain floats; None: as the checkpoint says.
    device_map
        As in `from_pretrained`: "auto", a device, or what goes where. Layers on "cpu" beside another device
        wait there and come for each product; ArgumentError for a quantized layer on "disk".
    tp_plan
        "auto": the ranks of torch.distributed share the model as transformers' plan for it says. CutError or
        DivideError on all of them, before a weight is read, where its format cannot be cut so.
    model_class
        Whose `from_pretrained` is called; None: the class that the config names, or `AutoModelForCausalLM`.
    quantization_config
        A `QloadConfig` whose quantizer quantizes plain layers while they are loaded, and whose `target`,
        `activations`, `nonfinite` and `facts` then count.
    options
        Further ones of `from_pretrained`.

    Raises
    ------
    ArgumentError
        For a parameter that cannot be acted on.
    MissingTensorError
        Where the checkpoint lacks a tensor of the model, which transformers alone would draw at random.
    UnreadTensorsError
        Where a tensor of the checkpoint is in a form that no format reads, before any weight is read.
    QloadError
        All that `open_checkpoint` and the loads of layers raise.
    """
    register()
    check_type("path", path, str | PathLike)
    check_type("quantization_config", quantization_config, QloadConfig | None)
    dtype = one_dtype(dtype, options.pop("torch_dtype", None))
    check_dtype(dtype)
    check_plan(tp_plan, options)
    asked = quantization_config or QloadConfig(
        target=target, activations=activations, nonfinite=nonfinite, facts=facts
    )
    names = (
        "cache_dir",
        "force_download",
        "local_files_only",
        "revision",
        "subfolder",
        "token",
        "trust_remote_code",
    )
    fetch = {name: options[name] for name in names if name in options}
    folder, files = folder_and_files(path, options)
    given = options.pop("config", None)
    config = copy(given) if given else transformers.AutoConfig.from_pretrained(folder, **fetch)
    if getattr(config, NAME, None) is None:
        setattr(config, FOUND, files)
    if tp_plan is not None:
        options["distributed_config"] = DistributedConfig(tp_plan=tp_plan)
    section = getattr(config, "quantization_config", None)
    if asked.quantizer is None:
        asked.checkpoint = section if isinstance(section, dict) else None
    config.quantization_config = {**asked.as_section(), "quant_method": METHOD}
    kind = model_class or class_of(config)
    wants_info = options.pop("output_loading_info", False)
    with named_files(path):
        model, info = kind.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            device_map=device_map,
            output_loading_info=True,
            **options,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise MissingTensorError(
            missing[0], missing[:SHOWN], [], f"{len(missing)} tensors of {kind.__name__}"
        )
    return (model, info) if wants_info else model


def one_dtype(dtype: Any, other: Any) -> Any:
    """What `dtype` says, or `torch_dtype`, its old name; ArgumentError where both say different things."""
    if dtype is None or other is None or dtype == other:
        return other if dtype is None else dtype
    raise ArgumentError("torch_dtype", f"{dtype}, as dtype says", str(other))


def check_dtype(dtype: Any) -> None:
    """ArgumentError where activations of `dtype`, a torch.dtype or the name of one, have no product."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto") and named not in DTYPES:
        expected = "None, 'auto', torch.float16, torch.bfloat16 or torch.float32"
        raise ArgumentError("dtype", expected, repr(dtype))


def check_plan(tp_plan: Any, options: Mapping[str, Any]) -> None:
    """ArgumentError where `tp_plan` is none, or where `options` has transformers' own way to say it too."""
    if tp_plan is None:
        return
    if tp_plan != "auto" and not isinstance(tp_plan, Mapping):
        raise ArgumentError("tp_plan", "None, 'auto', or styles by names of layers", repr(tp_plan))
    if options.get("distributed_config") is not None:
        expected = "one of the two: a DistributedConfig has a tp_plan of its own"
        raise ArgumentError("tp_plan", expected, "tp_plan and distributed_config")


def class_of(config: Any) -> Any:
    """The class that a config names first, where transformers has it; else that of causal language models."""
    found = getattr(transformers, str(next(iter(config.architectures or ()), "")), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else transformers.AutoModelForCausalLM


TRIED = ("5.23.0",)

# What is called or overridden, by the module that has it: public or not, all of it is checked by name.
HOOKS = (
    ("transformers", "AutoConfig"),
    ("transformers.conversion_mapping", "get_model_conversion_mapping"),
    ("transformers.core_model_loading", "WeightConverter"),
    ("transformers.core_model_loading", "WeightRenaming"),
    ("transformers.core_model_loading", "rename_source_key"),
    ("transformers.distributed.configuration_utils", "DistributedConfig"),
    ("transformers.distributed.parallel_utils", "_get_parameter_plan"),
    ("transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS"),
    ("transformers.integrations.moe", "_default_apply_gate"),
    ("transformers.modeling_utils", "PreTrainedModel.num_parameters"),
    ("transformers.quantizers.auto", "AUTO_QUANTIZATION_CONFIG_MAPPING"),
    ("transformers.quantizers.auto", "AUTO_QUANTIZER_MAPPING"),
    ("transformers.quantizers.base", "HfQuantizer._process_model_after_weight_loading"),
    ("transformers.quantizers.base", "HfQuantizer._process_model_before_weight_loading"),
    ("transformers.quantizers.base", "HfQuantizer.update_attn_implementation"),
    ("transformers.quantizers.base", "HfQuantizer.update_parallel_plan"),
    ("transformers.quantizers.base", "HfQuantizer.validate_environment"),
    ("transformers.utils.quantization_config", "QuantizationConfigMixin.to_dict"),
)


def missing_hook() -> str | None:
    """The full name of the first of `HOOKS` that the installed transformers has not; None: it has all."""
    for module, name in HOOKS:
        try:
            held: object = import_module(module)
            for part in name.split("."):
                held = getattr(held, part)
        except (ImportError, AttributeError):
            return f"{module}.{name}"
    return None


def check_version() -> None:
    """Warn where transformers is of a version that was not tried; ArgumentError where it lacks a hook."""
    version = transformers.__version__
    missing = missing_hook()
    if missing is not None:
        tried = ", ".join(TRIED)
        raise ArgumentError("transformers", f"{missing}, as version {tried} has it", f"version {version}")
    if version not in TRIED:
        text = f"qload was tried with transformers {', '.join(TRIED)}, and this is {version}"
        warnings.warn(text, stacklevel=2)
