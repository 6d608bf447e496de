"""Linears and experts on a CUDA device, by the native module."""

from qload.kernels.cuda.experts import can_multiply_experts, experts_linear, why_no_experts
from qload.kernels.cuda.linear import can_multiply, linear, why_not_linear
from qload.kernels.cuda.module import why_not

__all__ = [
    "can_multiply",
    "can_multiply_experts",
    "experts_linear",
    "linear",
    "why_no_experts",
    "why_not",
    "why_not_linear",
]
