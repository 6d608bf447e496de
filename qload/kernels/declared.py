"""Checks of the quantization of inputs that a weight declares, and the quantized inputs of each part."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels.activations import MOST, QuantizedActivations, quantize
from qload.kernels.cuda.quantize import inputs
from qload.kernels.quantized_inputs import Inputs, MadeInputs
from qload.spec import ActivationScheme, Weight

Activations = Literal["declared", "unquantized"]
Maximum = Callable[[Tensor], Tensor] | Literal["own"] | None
FOUND = ("tensor", "token", "group", "tensor_group")  # strategies whose scales are found
WHOLE_BITS = range(2, 9)
REMEDY = 'or activations="unquantized", for inputs as they come'


def why_not(weight: Weight) -> str | None:
    """Reason why inputs cannot be quantized as a weight declares, or None; None without a declaration."""
    scheme = weight.activations
    if scheme is None:
        return None
    return why_no_quantizer(scheme) or _why_not_here(weight, scheme)


def why_no_quantizer(scheme: ActivationScheme) -> str | None:
    """Reason why no quantizer implements a scheme, for any weight, or None."""
    if scheme.bits not in (WHOLE_BITS if scheme.type == "int" else MOST):
        return f"nothing here makes codes of {scheme.type}{scheme.bits}"
    if scheme.type == "float" and not scheme.symmetric:
        return "floats have no zero point"
    if scheme.strategy is None:
        return "the config does not say which inputs share a scale"
    if not scheme.dynamic:
        return None if scheme.strategy == "tensor" else f"no stored scale is one a {scheme.strategy}"
    if scheme.strategy not in FOUND:
        return f"nothing here finds scales of a {scheme.strategy}"
    if scheme.scale_type != "float32" and scheme.type == "int":
        return f"scales of whole numbers are not rounded to {scheme.scale_type}"
    return None


def check(weight: Weight, activations: Activations, maximum: Maximum) -> None:
    """Check a declared scheme; ArgumentError if it is unsupported or needs maxima of other ranks."""
    scheme, reason = weight.activations, why_not(weight)
    if scheme is None or activations == "unquantized":
        return
    name = weight.layer.name or type(weight).__name__
    if reason is not None:
        raise ArgumentError(f"{name}: activations", f"what can be quantized, {REMEDY}", f"{scheme}: {reason}")
    if maximum is None and scheme.finds_maxima and is_share(weight):
        whole = f"maximum_over(process_group), as a scale covers all {weight.layer.whole[1]} inputs; 'own'"
        raise ArgumentError(
            f"{name}: maximum", f"{whole}, for one of this rank's {weight.layer.K}; {REMEDY}", "None"
        )


def is_share(weight: Weight) -> bool:
    """Return whether a weight has a part of its layer's inputs."""
    whole = weight.layer.whole[1]
    return whole != weight.layer.K


def merge_parts(stack: Any) -> Any:
    """Merge stored scales and zero points of inputs, if all parts of each expert of a stack have equal ones.

    One quantization then serves gate and up. The merged stack has no origin, as `restore` could not return
    the stored shape.
    """
    scheme, merged = stack.layer.activations, dict[str, Tensor]()
    for name in () if scheme is None else filter(None, (scheme.scale, scheme.zero_point)):
        stored = stack.tensors.get(name)
        has_values = type(stored) in (Tensor, torch.nn.Parameter) and not stored.is_meta
        if has_values and stored.ndim == 2 and stored.shape[1] > 1:
            if not bool((stored == stored[:, :1]).all()):
                return stack
            merged[name] = stored[:, :1].contiguous()
    return replace(stack, layer=replace(stack.layer, origin=None)).holding(merged) if merged else stack


@dataclass(frozen=True, eq=False)
class QuantizationRequest:
    """Arguments of `quantize`: inputs (M, K), scheme, stored scale and zero point, maxima of other ranks."""

    x: Tensor
    scheme: ActivationScheme
    scale: Tensor | None
    zero_point: Tensor | None
    maximum: Callable[[Tensor], Tensor] | None

    def quantize(self) -> QuantizedActivations:
        """By plain torch."""
        return quantize(self.x, self.scheme, self.scale, self.zero_point, self.maximum)

    def inputs(self) -> Inputs:
        """Inputs for a product, by native code if it supports them."""
        native = None
        if self.maximum is None and self.x.ndim == 2:
            native = inputs(self.x, self.scheme, self.scale, self.zero_point)
        return MadeInputs(self.quantize()) if native is None else native


def quantized(x: Tensor, weight: Weight, maximum: Maximum) -> Iterator[tuple[QuantizedActivations, slice]]:
    """Yield x quantized, with its outputs: all, or those of a part."""
    for each, rows in quantization_requests(x, weight, maximum):
        yield each.quantize(), rows


def quantization_requests(
    x: Tensor, weight: Weight, maximum: Maximum
) -> Iterator[tuple[QuantizationRequest, slice]]:
    """Yield the arguments of `quantize` with their outputs: all, or those of a part.

    Fused parts that store scales of their own each quantize x by theirs.
    """
    scheme = weight.activations
    assert scheme is not None
    scale, zeros = (_stored(weight, name) for name in (scheme.scale, scheme.zero_point))
    shared = scheme.finds_maxima and is_share(weight)
    over = maximum if shared and callable(maximum) else None
    parts = max(1 if stored is None else stored.numel() for stored in (scale, zeros))
    at, widths = 0, weight.layer.parts if parts > 1 else (weight.layer.N,)
    for part, width in enumerate(widths):
        yield (
            QuantizationRequest(x, scheme, _of_part(scale, part), _of_part(zeros, part), over),
            slice(at, at + width),
        )
        at += width


def _why_not_here(weight: Weight, scheme: ActivationScheme) -> str | None:
    if scheme.dynamic is not True and scheme.scale is None:
        return "no scale is stored"
    if not scheme.dynamic and not scheme.symmetric and scheme.zero_point is None:
        return "no zero point is stored"
    lost = {scheme.scale, scheme.zero_point} - {None, *weight.fields()}
    if lost:
        return f"{weight.format} has no {' and no '.join(sorted(map(str, lost)))}"
    if scheme.size is not None and weight.layer.K % scheme.size:
        return f"K = {weight.layer.K} does not divide into groups of {scheme.size}"
    if any(tensor.dtype == torch.float8_e4m3fnuz for tensor in weight.fields().values()):
        return "nothing here makes codes of float8_e4m3fnuz"
    return None


def _stored(weight: Weight, name: str | None) -> Tensor | None:
    return None if name is None else weight.fields()[name]


def _of_part(stored: Tensor | None, part: int) -> Tensor | None:
    """Value of a part, or the shared one."""
    if stored is None or stored.numel() == 1:
        return stored
    return stored[part]
