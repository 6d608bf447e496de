"""The kernel that always works: say what x and the weight mean, then multiply; a native one where it fits."""

import torch
from torch import Tensor

from qload.errors import ArgumentError, DtypeError, ShapeError
from qload.kernels import cuda, declared
from qload.kernels.declared import Activations, Maximum
from qload.spec import Weight

WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    activations: Activations = "declared",
    maximum: Maximum = None,
) -> Tensor:
    """(..., K) -> (..., N) in x's dtype: products and sums in float32 (float64 for float64), one rounding.

    Inputs are multiplied by the weight's `input_factors` first, where it has some, then quantized, where the
    weight declares it and `activations` does not say "unquantized"; `maximum` as `Weight.get_linear` has it.
    Native kernels take inputs as they come, and none that are to be quantized.
    """
    check(x, weight, bias)
    if not quantizes(weight, activations) and x.is_cuda and cuda.can_multiply(x, weight, bias):
        return cuda.linear(x, weight, bias)
    declared.check(weight, activations, maximum)
    wide = torch.promote_types(x.dtype, torch.float32)
    w, b = weight.dequantize().to(wide), None if bias is None else bias.to(wide)
    return product(x.to(wide), weight, w, b, activations, maximum).to(x.dtype)


def quantizes(weight: Weight, activations: Activations) -> bool:
    """Whether the weight declares that inputs are quantized, and the caller does not say otherwise."""
    return activations == "declared" and weight.activations is not None


def product(
    x: Tensor, weight: Weight, matrix: Tensor, bias: Tensor | None, activations: Activations, maximum: Maximum
) -> Tensor:
    """(..., K) -> (..., N), unrounded: x as the weight takes it, times the `matrix` (N, K) that it means.

    x, `matrix` and `bias` (N,) have one dtype; `declared.check` has nothing against the rest.
    """
    factors = weight.input_factors
    taken = x if factors is None else x * factors.to(x.dtype)
    if not quantizes(weight, activations):
        return torch.nn.functional.linear(taken, matrix, bias)
    made = [
        torch.nn.functional.linear(each, matrix[rows], None if bias is None else bias[rows])
        for each, rows in declared.quantized(taken, weight, maximum)
    ]
    return torch.cat(made, -1)


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
