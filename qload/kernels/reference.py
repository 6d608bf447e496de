"""The kernel that always works: say what the weight means, then multiply; a native one where it fits."""

import torch
from torch import Tensor

from qload.errors import ArgumentError, DtypeError, ShapeError
from qload.kernels import cuda
from qload.spec import Weight

WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """(..., K) -> (..., N) in x's dtype: products and sums in float32 (float64 for float64), one rounding.

    Inputs are multiplied by the weight's `input_factors` first, where it has some.
    """
    check(x, weight, bias)
    if x.is_cuda and cuda.can_multiply(x, weight, bias):
        return cuda.linear(x, weight, bias)
    wide, factors = torch.promote_types(x.dtype, torch.float32), weight.input_factors
    return torch.nn.functional.linear(
        x.to(wide) if factors is None else x.to(wide) * factors.to(wide),
        weight.dequantize().to(wide),
        None if bias is None else bias.to(wide),
    ).to(x.dtype)


def check(x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    """x is a float tensor (..., K) on the weight's device, `bias` is (N,), or an error that names it."""
    name = weight.layer.name or type(weight).__name__
    if x.dtype not in WIDE:
        raise DtypeError(f"{name}: x", list(map(_plain, WIDE)), _plain(x.dtype))
    if bias is not None and tuple(bias.shape) != (weight.layer.N,):
        raise ShapeError(f"{name}: bias", f"({weight.layer.N},) = (N,)", tuple(bias.shape))
    if x.ndim == 0 or x.shape[-1] != weight.layer.K:
        raise ShapeError(f"{name}: x", f"(..., {weight.layer.K}) = (..., K)", tuple(x.shape))
    if x.device != weight.device:
        raise ArgumentError(f"{name}: x", f"a tensor on {weight.device}, as the weight", str(x.device))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
