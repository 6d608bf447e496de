"""Names of vLLM that the plug-in uses, checked before use, and the tested versions of vLLM."""

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from qload.errors import ArgumentError

TRIED = ("0.33.0",)
QUANTIZATION, LAYERS = "vllm.model_executor.layers.quantization", "vllm.model_executor.layers"
REGISTRATION_HOOKS = (
    (QUANTIZATION, "QUANTIZATION_METHODS"),
    (QUANTIZATION, "register_quantization_config"),
    (f"{QUANTIZATION}.base_config", "QuantizationConfig"),
    (f"{QUANTIZATION}.base_config", "QuantizeMethodBase"),
)
LOADING_HOOKS = (
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
_warned: set[str] = set()


def installed_version() -> str:
    """Return the version of vLLM; "of no version" if its files are not an installed package."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "of no version"


def check_version() -> None:
    """Log a warning, once, for an untested version of vLLM."""
    installed = installed_version()
    if installed.partition("+")[0] not in TRIED and installed not in _warned:
        _warned.add(installed)
        _LOG.warning("vLLM %s: tried with %s; its interfaces may have changed", installed, ", ".join(TRIED))


def hook(module: str, name: str) -> Any:
    """Import `name` from vLLM's `module`; ArgumentError, which names both, if this version lacks it."""
    try:
        return getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "vllm":
            raise  # a dependency is missing, named by the error itself
        expected = f"a version with {module}.{name}, such as {TRIED[-1]}"
        raise ArgumentError("vllm", expected, f"{installed_version()}, without it") from None


def check_hooks(needed: tuple[tuple[str, str], ...]) -> None:
    """Raise ArgumentError for the first of these names that vLLM lacks."""
    for module, name in needed:
        hook(module, name)
