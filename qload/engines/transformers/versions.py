"""Which versions of transformers this was tried with, and what of them it stands on."""

import warnings
from importlib import import_module

import transformers

from qload.errors import ArgumentError

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
