"""Operators on a CUDA device, where the native module was built: move, dequantize, multiply."""

from qload.kernels.cuda.dequantize import as_stored, dequantize
from qload.kernels.cuda.linear import can_multiply, linear, why_not_linear
from qload.kernels.cuda.module import why_not
from qload.kernels.cuda.move import move, reorder

__all__ = [
    "as_stored",
    "can_multiply",
    "dequantize",
    "linear",
    "move",
    "reorder",
    "why_not",
    "why_not_linear",
]
