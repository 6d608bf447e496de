"""The kernel that always works: say what x and the weight mean, then multiply; a native one where it fits."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qload.errors import ArgumentError, DtypeError, ShapeError, check_type
from qload.kernels import cpu, cuda, declared, products, scaled, sums
from qload.kernels.cpu_rows import KeptRows
from qload.kernels.declared import Activations, Maximum
from qload.spec import Weight, can_cut, outputs

WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    activations: Activations = "declared",
    maximum: Maximum = None,
    kept: KeptRows | None = None,
) -> Tensor:
    """(..., K) -> (..., N) in x's dtype: the weight rounded to it, sums in float32, one rounding.

    `qload.kernels.products` says how, and what that costs; a plain weight of x's dtype is torch's own linear
    and nothing else. Inputs are multiplied by the weight's `input_factors` first, where it has some, then
    quantized, where the weight declares it and `activations` does not say "unquantized"; `maximum` as
    `Weight.get_linear` has it. Native kernels take inputs as they come; those of a CPU, which round no
    weight, also what is left of quantized ones. `kept`: what a CPU keeps of a layer from call to call.
    """
    check(x, weight, bias)
    if quantizes(weight, activations):
        declared.check(weight, activations, maximum)
    else:
        if _is_own(x, weight, bias):
            return functional.linear(x, weight.dequantize(x.dtype), bias)
        if x.is_cuda and cuda.can_multiply(x, weight, bias):
            return cuda.linear(x, weight, bias)
        if x.device.type == "cpu":
            made = cpu.multiply(x, weight, bias, kept=kept)
            if made is not None:
                return made
            cpu.advise_panels(x, weight)
    K = weight.layer.K
    with sums.in_given_types(x):
        y = product(x.reshape(math.prod(x.shape[:-1]), K), weight, bias, activations, maximum, kept=kept)
    return y.reshape(*x.shape[:-1], weight.layer.N)


def quantizes(weight: Weight, activations: Activations) -> bool:
    """Whether the weight declares that inputs are quantized, and the caller does not say otherwise."""
    return activations == "declared" and weight.activations is not None


def product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    activations: Activations,
    maximum: Maximum,
    narrow: torch.dtype | None = None,
    kept: KeptRows | None = None,
) -> Tensor:
    """x (M, K), as it came, times a weight, plus a bias (N,) -> (M, N) in x's dtype.

    By no native kernel for inputs as they come. `declared.check` has nothing against the rest. `narrow`: what
    is multiplied is rounded to this type, if not to that of x. `kept`: what a CPU keeps of the weight.
    """
    if not quantizes(weight, activations):
        return products.multiply(x, weight, bias, weight.input_factors, narrow)
    taken, types = _taken(x, weight), (x.dtype, narrow or x.dtype)
    made = [
        _of_part(types, taken, each, weight, rows, None if bias is None else bias[rows], kept)
        for each, rows in declared.asked(taken.detach(), weight, maximum)
    ]
    return made[0] if len(made) == 1 else torch.cat(made, -1)


def _of_part(
    types: tuple[torch.dtype, torch.dtype],
    taken: Tensor,
    asked: declared.Asked,
    weight: Weight,
    rows: slice,
    bias: Tensor | None,
    kept: KeptRows | None,
) -> Tensor:
    """What inputs became, times the outputs of a part; gradients pass the codes as if `taken` were they.

    `types`: of the result, and what is multiplied is rounded to.
    """
    part, within = weight, rows
    if can_cut(weight, rows.start, rows.stop):
        part, within = outputs(weight, rows.start, rows.stop), slice(None)
    elif bias is not None:
        bias = functional.pad(bias, (rows.start, weight.layer.N - rows.stop))
    if products.wants_gradients(taken, bias):
        inputs: Tensor = _AsTaken.apply(taken, asked.quantize().dequantize())  # type: ignore[no-untyped-call]
        return products.multiply(inputs, part, bias).to(types[0])[:, within]
    whole = part is weight or part.shape == weight.shape
    return scaled.multiply(asked.inputs(), part, bias, *types, kept if whole else None)[:, within]


class _AsTaken(torch.autograd.Function):
    """What inputs became, with the gradients of what they were."""

    @staticmethod
    def forward(ctx: Any, taken: Tensor, became: Tensor) -> Tensor:
        return became.to(taken.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _taken(x: Tensor, weight: Weight) -> Tensor:
    """Inputs times their factors, where there are some, in float32."""
    factors = weight.input_factors
    return x if factors is None else x.to(torch.promote_types(x.dtype, torch.float32)) * factors.float()


def _is_own(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """Whether this is torch's own linear: a plain weight and a bias in the dtype of x."""
    if not weight.plain or any(tensor.dtype != x.dtype for tensor in weight.fields().values()):
        return False
    return bias is None or bias.dtype == x.dtype


def are_tensors(x: object, bias: object) -> bool:
    """Return whether x is a tensor and `bias` a tensor or None."""
    return isinstance(x, Tensor) and (bias is None or isinstance(bias, Tensor))


def check_tensors(weight: Weight, x: object, bias: object) -> None:
    """Raise ArgumentError unless x is a tensor and `bias` a tensor or None."""
    check_type("weight", weight, Weight)
    if are_tensors(x, bias):
        return
    name = weight.layer.name or type(weight).__name__
    check_type(f"{name}: x", x, Tensor)
    check_type(f"{name}: bias", bias, Tensor | None)


def check(x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    """x is a float tensor (..., K) on the weight's device, `bias` is (N,), or an error that names it."""
    check_tensors(weight, x, bias)
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
