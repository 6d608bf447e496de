"""Linears on a CUDA device, where the native module was built."""

from qload.kernels.cuda.linear import can_multiply, linear, why_not_linear
from qload.kernels.cuda.module import why_not

__all__ = ["can_multiply", "linear", "why_not", "why_not_linear"]
