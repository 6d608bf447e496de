"""From typed weights to what a kernel reads, and the calls: why not, repack, multiply."""

from qload.kernels.exl2 import Exl2KernelWeight
from qload.kernels.exllama import ExllamaConfig, ExllamaWeight
from qload.kernels.fp8_marlin import FP8MarlinConfig, FP8MarlinWeight
from qload.kernels.loaders import GPTQMarlinWeightsLoader, RepackingLoader
from qload.kernels.marlin import GPTQMarlinConfig, GPTQMarlinWeight
from qload.kernels.mp_linear import (
    KERNELS,
    DequantizeLinearKernel,
    ExllamaLinearKernel,
    MarlinLinearKernel,
    MPLinearKernel,
    MPLinearLayerConfig,
    StripsLinearKernel,
    choose_mp_linear_kernel,
    permute_param_layout_,
)
from qload.kernels.repack import LAYOUTS, repack, restore
from qload.kernels.scalar_type import ScalarType, scalar_types
from qload.kernels.scratch import warm_up
from qload.kernels.strips import StripsConfig, StripsWeight

__all__ = [
    "KERNELS",
    "LAYOUTS",
    "DequantizeLinearKernel",
    "Exl2KernelWeight",
    "ExllamaConfig",
    "ExllamaLinearKernel",
    "ExllamaWeight",
    "FP8MarlinConfig",
    "FP8MarlinWeight",
    "GPTQMarlinConfig",
    "GPTQMarlinWeight",
    "GPTQMarlinWeightsLoader",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "MarlinLinearKernel",
    "RepackingLoader",
    "ScalarType",
    "StripsConfig",
    "StripsLinearKernel",
    "StripsWeight",
    "choose_mp_linear_kernel",
    "permute_param_layout_",
    "repack",
    "restore",
    "scalar_types",
    "warm_up",
]
