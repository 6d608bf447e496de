"""The kernel that always works: say what the weight means, then multiply."""

import torch
from torch import Tensor

from qload.errors import ArgumentError, DtypeError, ShapeError
from qload.spec import Weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """(..., K) -> (..., N) in x's dtype: products and sums in float32 (float64 for float64), one rounding."""
    check(x, weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.linear(
        x.to(wide), weight.dequantize().to(wide), None if bias is None else bias.to(wide)
    ).to(x.dtype)


def check(x: Tensor, weight: Weight) -> None:
    """x is a float tensor (..., K) on the weight's device, or an error that names it."""
    name = weight.layer.name or type(weight).__name__
    if not x.dtype.is_floating_point:
        raise DtypeError(f"{name}: x", ["a floating point dtype"], str(x.dtype).removeprefix("torch."))
    if x.ndim == 0 or x.shape[-1] != weight.layer.K:
        raise ShapeError(f"{name}: x", f"(..., {weight.layer.K}) = (..., K)", tuple(x.shape))
    if x.device != weight.device:
        raise ArgumentError(f"{name}: x", f"a tensor on {weight.device}, as the weight", str(x.device))
