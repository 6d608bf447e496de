"""The names of vLLM that the plug-in stands on, and the versions of it that were tried."""

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from qload.errors import ArgumentError

TRIED = ("0.33.0",)
QUANTIZATION, LAYERS = "vllm.model_executor.layers.quantization", "vllm.model_executor.layers"
TO_REGISTER = (
    (QUANTIZATION, "QUANTIZATION_METHODS"),
    (QUANTIZATION, "register_quantization_config"),
    (f"{QUANTIZATION}.base_config", "QuantizationConfig"),
    (f"{QUANTIZATION}.base_config", "QuantizeMethodBase"),
)
TO_LOAD = (
    (f"{LAYERS}.linear", "LinearBase"),
    (f"{LAYERS}.linear", "LinearMethodBase"),
    (f"{LAYERS}.linear", "UnquantizedLinearMethod"),
    (f"{LAYERS}.vocab_parallel_embedding", "ParallelLMHead"),
    (f"{LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    (f"{LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding"),
    (f"{LAYERS}.fused_moe", "RoutedExperts"),
    (f"{LAYERS}.fused_moe.fused_moe_method_base", "FusedMoEMethodBase"),
    ("vllm.model_executor.models.utils", "WeightsMapper"),
)
_LOG = logging.getLogger("qload")
_seen: set[str] = set()


def installed() -> str:
    """The version of vLLM; "of no version" where its files stand without a package."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "of no version"


def check_version() -> None:
    """Log a warning, once, where this version of vLLM was not tried."""
    here = installed()
    if here.partition("+")[0] not in TRIED and here not in _seen:
        _seen.add(here)
        _LOG.warning("vLLM %s: tried with %s; its interfaces may have changed", here, ", ".join(TRIED))


def hook(module: str, name: str) -> Any:
    """What vLLM has as `name` in `module`; ArgumentError, which says both, where it has no such thing."""
    try:
        return getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "vllm":
            raise  # something else is not installed, which its own words say best
        expected = f"a version that has {module}.{name}, such as {TRIED[-1]}"
        raise ArgumentError("vllm", expected, f"{installed()}, which has none") from None


def check_hooks(needed: tuple[tuple[str, str], ...]) -> None:
    """Every one of these is there, or ArgumentError with the first that is not."""
    for module, name in needed:
        hook(module, name)
