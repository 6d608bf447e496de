"""x times a typed weight on a CUDA device, where its layout has kernels of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qload.kernel_formats.exllama import ExllamaWeight
from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernel_formats.strips import StripsWeight
from qload.kernels.cuda import calls, exllama, marlin, strips
from qload.kernels.cuda.calls import LinearCall
from qload.kernels.cuda.choice import CudaKernel
from qload.kernels.cuda.module import why_not
from qload.spec import Weight


@dataclass(frozen=True)
class LinearOperator:
    """How weights of one type are multiplied: why not, or y (M, N) of x (M, K), weight and bias.

    And the kernels among which is chosen, by a call that is made of these arguments; `why_not_on`: the same
    question of a chip that need not be here.
    """

    why_not: Callable[[Any, torch.dtype], str | None]
    linear: Callable[..., Tensor]
    kernels: tuple[CudaKernel, ...]
    call: Callable[..., LinearCall]
    arguments: Callable[[Tensor, Any], tuple[Any, ...]]
    why_not_on: Callable[[Any, torch.dtype, tuple[int, int]], str | None] = calls.why_not_on


OPERATORS: dict[type[Weight], LinearOperator] = {
    ExllamaWeight: LinearOperator(
        exllama.why_not,
        exllama.linear,
        exllama.KERNELS,
        exllama.ExllamaCall,
        exllama.arguments,
        exllama.why_not_on,
    ),
    GPTQMarlinWeight: LinearOperator(
        calls.why_not, marlin.linear, marlin.KERNELS, marlin.MarlinCall, marlin.arguments
    ),
    StripsWeight: LinearOperator(
        calls.why_not, strips.linear, strips.KERNELS, strips.StripsCall, marlin.arguments
    ),
}


def why_not_linear(weight: Weight, dtype: torch.dtype) -> str | None:
    """Why activations of a dtype cannot be multiplied with a weight as it lies, or None."""
    operator = OPERATORS.get(type(weight))
    if operator is None:
        return unread(type(weight))
    return why_not() or operator.why_not(weight, dtype)


def unread(weight_type: type[Weight]) -> str:
    """That no kernel of ours reads weights of a type."""
    return f"no CUDA kernel reads {weight_type.__name__}"


def can_multiply(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """Whether `linear` multiplies this: a weight that fits, a bias in x's dtype, no gradient asked for."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    same = bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    return same and not wanted and why_not_linear(weight, x.dtype) is None


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, **options: Any) -> Tensor:
    """(..., K) -> (..., N) in x's dtype, sums in float32; asks nobody whether the weight fits."""
    N, K = weight.shape
    y = OPERATORS[type(weight)].linear(x.reshape(-1, K), weight, bias, **options)
    return y.reshape(*x.shape[:-1], N)


def call_of(x: Tensor, weight: Weight) -> LinearCall:
    """What kernels are given of these two."""
    operator = OPERATORS[type(weight)]
    return operator.call(*operator.arguments(x, weight))


def able(x: Tensor, weight: Weight) -> list[str]:
    """The names of the kernels that multiply these two."""
    call = call_of(x, weight)
    return [kernel.name for kernel in OPERATORS[type(weight)].kernels if kernel.why_not(call) is None]
