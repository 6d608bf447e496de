"""From typed weights to what a kernel reads, and the calls: why not, repack, multiply."""

from qload.kernels.exllama import ExllamaConfig, ExllamaWeight
from qload.kernels.marlin import GPTQMarlinConfig, GPTQMarlinWeight
from qload.kernels.repack import LAYOUTS, repack, restore

__all__ = [
    "LAYOUTS",
    "ExllamaConfig",
    "ExllamaWeight",
    "GPTQMarlinConfig",
    "GPTQMarlinWeight",
    "repack",
    "restore",
]
