"""Kernels for linear layers and experts: `Linear`, native products, mixed-precision kernels.

`KERNELS` has every kernel, in the order in which `choose_mp_linear_kernel` asks them.
"""

from qload.kernels.linear import Linear, copy_into
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
from qload.kernels.scalar_type import ScalarType, scalar_types
from qload.kernels.scratch import warm_up

__all__ = [
    "KERNELS",
    "DequantizeLinearKernel",
    "ExllamaLinearKernel",
    "Linear",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "MarlinLinearKernel",
    "ScalarType",
    "StripsLinearKernel",
    "choose_mp_linear_kernel",
    "copy_into",
    "permute_param_layout_",
    "scalar_types",
    "warm_up",
]
