"""From a checkpoint's JSON and tensors to the loader that reads it."""

from qload.detect.agreement import check_configs, config_notes
from qload.detect.claims import read_claims
from qload.detect.files import FoundConfig, find_config, find_configs, read_model_config
from qload.detect.loaders import (
    AWQWeightsLoader,
    DefaultWeightsLoader,
    EETQWeightsLoader,
    Exl2WeightsLoader,
    GPTQWeightsLoader,
    KernelTarget,
    MarlinWeightsLoader,
    Target,
    for_target,
    loader_from_claims,
    loader_from_config,
    settle,
)
from qload.detect.validation import Claims

__all__ = [
    "AWQWeightsLoader",
    "Claims",
    "DefaultWeightsLoader",
    "EETQWeightsLoader",
    "Exl2WeightsLoader",
    "FoundConfig",
    "GPTQWeightsLoader",
    "KernelTarget",
    "MarlinWeightsLoader",
    "Target",
    "check_configs",
    "config_notes",
    "find_config",
    "find_configs",
    "for_target",
    "loader_from_claims",
    "loader_from_config",
    "read_claims",
    "read_model_config",
    "settle",
]
