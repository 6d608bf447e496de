"""HQQ: `quant_method: hqq`, or the tensors alone: hqq's own files have no quantization config.

    {"quant_method": "hqq", "quant_config": {"weight_quant_params": {...}, ...}, "skip_modules": [...]}

Each layer has its own settings, which take precedence (`formats.hqq`). Source: hqq 0.2.8 and transformers 4.
"""

from collections.abc import Mapping
from typing import Any

from qload import configs
from qload.formats.hqq.settings import CODES, PACKING
from qload.formats.hqq.weight import HQQConfig, HQQWeight
from qload.loader import ConfiguredFormat
from qload.storage import WeightStorage

METHOD = "hqq"
# Settings of the quantizer, and of Python's objects, that no weight depends on.
SETTINGS = (
    "offload_meta", "encoded_state_dict", "stores_quant_config", "optimize", "round_zero",
    "unpack_view_dtype",
)  # fmt: skip


class _Section(configs.Section):
    quant_config: dict[str, Any] | None = None
    skip_modules: configs.NameList | None = None

    lists = ("skip_modules", "modules_to_not_convert")


def read_hqq(source: configs.FoundConfig) -> configs.Claims:
    """Read the excluded modules of a config; formats are in the settings of layers."""
    section = configs.validate(_Section, source)
    fmt = ConfiguredFormat(HQQWeight, HQQConfig())
    return section.claims(source, METHOD, METHOD, fmt, settings=SETTINGS)


def found_config(storage: WeightStorage, model: Mapping[str, Any]) -> configs.FoundConfig | None:
    """Config of a checkpoint without one, whose layers have HQQ's codes and settings; None for any other."""
    names, ending = storage.keys(), f".{CODES}"
    prefixes = (name.removesuffix(ending) for name in names if name.endswith(ending))
    prefix = next((prefix for prefix in prefixes if f"{prefix}.{PACKING}" in names), None)
    if prefix is None:
        return None
    file = storage.info(f"{prefix}{ending}").file
    return configs.FoundConfig(file or "tensors", "", {"quant_method": METHOD})


METHODS = (
    configs.Method(
        names=(METHOD,),
        read=read_hqq,
        formats=(HQQWeight,),
        variants=("hqq",),
        exclusion_key="skip_modules",
    ),
)
