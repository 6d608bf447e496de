"""Weights in the orders that kernels read, a module each, and the ways between them: `repack`, `restore`.

`LAYOUTS` has the name of every layout that `repack` takes.
"""

from qload.kernel_formats.exl2 import Exl2KernelWeight
from qload.kernel_formats.exllama import ExllamaConfig, ExllamaWeight
from qload.kernel_formats.fp4_marlin import (
    Fp4MarlinConfig,
    Fp4MarlinVllm033Config,
    Fp4MarlinVllm033Weight,
    Fp4MarlinWeight,
)
from qload.kernel_formats.fp8_marlin import Fp8MarlinConfig, Fp8MarlinWeight
from qload.kernel_formats.marlin import GPTQMarlinConfig, GPTQMarlinWeight
from qload.kernel_formats.panels import PanelsConfig, PanelsWeight
from qload.kernel_formats.repack import LAYOUTS, repack, restore
from qload.kernel_formats.strips import StripsConfig, StripsWeight

__all__ = [
    "LAYOUTS",
    "Exl2KernelWeight",
    "ExllamaConfig",
    "ExllamaWeight",
    "Fp4MarlinConfig",
    "Fp4MarlinVllm033Config",
    "Fp4MarlinVllm033Weight",
    "Fp4MarlinWeight",
    "Fp8MarlinConfig",
    "Fp8MarlinWeight",
    "GPTQMarlinConfig",
    "GPTQMarlinWeight",
    "PanelsConfig",
    "PanelsWeight",
    "StripsConfig",
    "StripsWeight",
    "repack",
    "restore",
]
