"""Dtype of a layer's activations: its scales in that dtype, its weights in that range.

Kernels multiply 16-bit activations by scales of the same type. A layer that lies in a kernel's order gets
its scales in the type of its activations once, when it is made: in bfloat16 each is within 2**-8 of what it
was, in float16 within 2**-11, and where a scale would lose more the layer is refused. Layers in a
checkpoint's order are dequantized whatever type their scales have, and keep them.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.formats import UnquantizedWeight
from qload.kernel_formats.exllama import ExllamaWeight
from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernel_formats.strips import StripsWeight
from qload.kernels.cuda.dispatch import ACTIVATIONS
from qload.spec import Weight
from qload.spec.casts import check_cast
from qload.spec.weight import tensor_names

log: logging.Logger = logging.getLogger("qload")

DTYPES = (*ACTIVATIONS, torch.float32)
ORDERS = (GPTQMarlinWeight, ExllamaWeight)  # strips are Marlin's order in other pieces
OTHERWISE = "get_linear(dtype=torch.bfloat16), which has the range, or dtype=torch.float32"
KEPT = "get_linear(dtype=None), which keeps what is stored, or a dtype that holds it"
NONE = "None, torch.float16, torch.bfloat16 or torch.float32"


def for_activations(weight: Weight, dtype: torch.dtype | None, remedy: str = KEPT) -> Weight:
    """Convert the scales of a weight for activations of a dtype; None: keep their dtype.

    A weight that was converted has no origin, for `restore` could not bring its scales back. Plain weights
    are cast. ArgumentError for any other dtype; CastError where a scale would lose more than one rounding, a
    plain weight would overflow, or weights of a kernel's order would when they are rounded to 16 bits.
    `remedy`: what a CastError of the first two says.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError("dtype", NONE, _plain(dtype))
    if isinstance(weight, UnquantizedWeight):
        return weight if dtype is None else _cast(weight, "weight", dtype, remedy)
    if not isinstance(weight, ORDERS) or dtype == torch.float32:
        return weight
    if _is_wide(weight):
        check_range(weight, dtype or torch.float32)
        return weight
    made = weight if dtype is None else _cast(weight, "scales", dtype, remedy)
    if dtype is not None and "offsets" in made.fields():
        made = _cast(made, "offsets", dtype, remedy)
    check_range(made, _scales(made).dtype)
    return made


def stack_for_activations(stack: Any, dtype: torch.dtype | None) -> Any:
    """Cast the scales of a stack of experts for activations of a dtype, as `for_activations` does."""
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError("dtype", NONE, _plain(dtype))
    if dtype is None or not issubclass(stack.weight_type, (UnquantizedWeight, *ORDERS)):
        return stack
    if "offsets" in stack.tensors:  # no kernel reads them
        return stack
    field = "weight" if issubclass(stack.weight_type, UnquantizedWeight) else "scales"
    if stack.tensors[field].dtype == dtype:
        return stack
    cast = torch.stack([for_activations(weight, dtype).fields()[field] for weight in stack])
    return replace(stack, layer=replace(stack.layer, origin=None)).holding({field: cast})


def bias_for(bias: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Cast the bias (N,) to the dtype of activations; None keeps it. CastError for an overflow."""
    if bias is None or dtype is None or bias.dtype == dtype:
        return bias
    made = bias.detach().to(dtype).requires_grad_(bias.requires_grad)  # a leaf, as the one that was given
    _check("bias", bias, made, tiny=False, remedy=KEPT)
    return made


def check_range(weight: Weight, dtype: torch.dtype, name: str | None = None, remedy: str = OTHERWISE) -> None:
    """Check that weights with integer codes stay finite in a 16-bit dtype; CastError.

    `weight` has `scales`, and its config `bits`. `name`: as the error has it, else the layer's.
    """
    scales = _scales(weight)
    if dtype not in ACTIVATIONS or not scales.numel() or not _has_values(scales):
        return
    least, largest = torch.aminmax(scales)
    most = float(torch.maximum(-least, largest)) * 2.0**weight.config.bits
    offsets: Tensor | None = getattr(weight, "offsets", None)
    if offsets is not None:
        most += float(offsets.abs().max())
    if not most <= torch.finfo(dtype).max:
        wide = weight.dequantize()
        named = name or weight.layer.name or "weight"
        check_cast(named, wide, wide.to(dtype), tiny=False, remedy=remedy)


class Notice:
    """One warning per module, for calls without a kernel for their activations' dtype."""

    def __init__(self) -> None:
        self.told = False

    def of(self, weight: Weight, x: Tensor, bias: Tensor | None = None) -> None:
        """A warning, if a kernel would multiply this weight were x of another type; not while traced."""
        if self.told or not isinstance(weight, ORDERS) or not x.is_cuda or torch.compiler.is_compiling():
            return
        scales = x.dtype if _is_wide(weight) else _scales(weight).dtype
        held = {"scales": scales, "a bias": x.dtype if bias is None else bias.dtype}
        if x.dtype in ACTIVATIONS and all(dtype == x.dtype for dtype in held.values()):
            return
        self.told = True
        name, got = _named(weight, "weight"), _plain(x.dtype)
        if x.dtype not in ACTIVATIONS:
            log.warning("%s: no kernel multiplies activations of %s: they take a slower way", name, got)
            return
        other = " and ".join(f"{what} of {_plain(dtype)}" for what, dtype in held.items() if dtype != x.dtype)
        way = f"get_linear(dtype=torch.{got}) has one"
        log.warning("%s: no kernel multiplies activations of %s by %s, %s", name, got, other, way)


def _cast(weight: Weight, field: str, dtype: torch.dtype, remedy: str) -> Weight:
    """The same weight, one tensor in another dtype."""
    held: Tensor = getattr(weight, field)
    if held.dtype == dtype:
        return weight
    made = held.to(dtype)
    _check(_named(weight, field), held, made, tiny=field == "scales", remedy=remedy)
    bound = torch.finfo(dtype).eps / 2
    was, now = _plain(held.dtype), _plain(dtype)
    log.info("%s: %s as %s, each within %g of itself", _named(weight, field), was, now, bound)
    tensors = {name: getattr(weight, name) for name in tensor_names(type(weight))}
    layer = replace(weight.layer, origin=None)
    return type(weight).unchecked(weight.config, layer, {**tensors, field: made})


def _check(name: str, before: Tensor, after: Tensor, *, tiny: bool, remedy: str) -> None:
    if _has_values(before) and after.dtype.itemsize <= before.dtype.itemsize:
        check_cast(name, before, after, tiny=tiny, remedy=remedy)


def _is_wide(weight: Weight) -> bool:
    """Return whether kernels read scales of a weight in float32."""
    return isinstance(weight, StripsWeight) and weight.is_wide


def _scales(weight: Any) -> Tensor:
    """Scales of a weight with integer codes."""
    scales: Tensor = weight.scales
    return scales


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values: not on meta, nor traced by shape alone."""
    return not tensor.is_meta and type(tensor) in (Tensor, torch.nn.Parameter)


def _named(weight: Weight, field: str) -> str:
    return f"{weight.layer.name}.{field}" if weight.layer.name else field


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
