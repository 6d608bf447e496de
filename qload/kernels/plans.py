"""Products of x (..., K) and the tensors of a linear layer: one table of ways, one cached plan for a layer.

    way            for                                          done by
    PLAIN          a plain weight in the dtype of x             torch's product
    QUANTIZED      inputs that the weight declares quantized    `cuda.linear`, after a launch that rounds x,
                                                                or `scaled`
    CUDA_KERNELS   an order that CUDA kernels read              `cuda.linear`: a `CudaPlan`, or an operator
    CPU_MODULE     panels, or codes in rows, on a CPU           `cpu`: a `PanelsPlan` or a `RowsPlan`;
                                                                without the CPU module, `products`
    DEQUANTIZED    everything else                              `products`

`multiply` takes the way of the table for one call, and refuses an x or a bias that does not fit. A module, or
a kernel of `mp_linear`, has a `LinearCall` and its tensors; the call keeps the native plan for the tensors,
device and dtypes of the last call, and leaves the rest to `multiply`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from qload.errors import ArgumentError, DtypeError, ShapeError, check_type
from qload.kernels import cpu, cuda, declared, products, scaled
from qload.kernels.cpu import KeptRows
from qload.kernels.cuda.linear import OPERATORS, CudaPlan, plan_of
from qload.kernels.declared import Activations, Maximum
from qload.spec import ActivationScheme, Weight, can_cut, outputs
from qload.spec.transforms import Transforms

WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes of x
PLAIN, DEQUANTIZED, QUANTIZED = "torch's product", "dequantize, then torch's product", "quantized inputs"
CUDA_KERNELS, CPU_MODULE = "CUDA kernels", "the CPU module"


def way_of(weight_type: type[Weight], scheme: ActivationScheme | None, device: str) -> str:
    """Way of products with weights of a type, on a type of device, with inputs quantized by a `scheme`."""
    if scheme is not None:
        return QUANTIZED
    if weight_type.plain:
        return PLAIN
    if device == "cuda" and weight_type in OPERATORS:
        return CUDA_KERNELS
    return CPU_MODULE if device == "cpu" and issubclass(weight_type, cpu.TYPES) else DEQUANTIZED


def scheme_of(weight: Weight, activations: Activations) -> ActivationScheme | None:
    """Scheme of quantized inputs, or None."""
    return weight.activations if activations == "declared" else None


def quantizes(weight: Weight, activations: Activations) -> bool:
    """Return whether inputs are quantized."""
    return scheme_of(weight, activations) is not None


def multiply(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    activations: Activations = "declared",
    maximum: Maximum = None,
    kept: KeptRows | None = None,
) -> Tensor:
    """(..., K) -> (..., N) in x's dtype: the weight rounded to it, sums in float32, one rounding.

    `qload.kernels.products` has the formula and its error; a plain weight of x's dtype is torch's product and
    nothing else. Inputs are multiplied by `input_factors` of the weight, then quantized as it declares unless
    `activations` is "unquantized"; `maximum` as for `Weight.get_linear`. Native kernels take inputs without
    factors; those of a CPU, which round no weight, also quantized ones. `kept`: rows of earlier calls.
    """
    check(x, weight, bias)
    way = way_of(type(weight), scheme_of(weight, activations), x.device.type)
    if way == QUANTIZED:
        declared.check(weight, activations, maximum)
    elif way == PLAIN and _in_dtype_of(x, weight, bias):
        return functional.linear(x, weight.dequantize(x.dtype), bias)
    elif way == CUDA_KERNELS and cuda.can_multiply(x, weight, bias):
        return cuda.linear(x, weight, bias)
    elif way == CPU_MODULE:
        y = cpu.multiply(x, weight, bias, kept)
        if y is not None:
            return y
    return multiply_in_torch(x, weight, bias, activations, maximum, kept)


def multiply_in_torch(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    activations: Activations,
    maximum: Maximum,
    kept: KeptRows | None,
) -> Tensor:
    """`multiply` of checked arguments, without native kernels for plain inputs."""
    if x.device.type == "cpu" and not quantizes(weight, activations):
        cpu.advise_panels(x, weight)
    with products.in_given_types(x):
        rows = x.reshape(math.prod(x.shape[:-1]), weight.layer.K)
        y = product(rows, weight, bias, activations, maximum, kept=kept)
    return y.reshape(*x.shape[:-1], weight.layer.N)


def product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    activations: Activations,
    maximum: Maximum,
    narrow: torch.dtype | None = None,
    kept: KeptRows | None = None,
) -> Tensor:
    """(M, K) -> (M, N) in x's dtype, of inputs quantized as declared, or by a dequantized weight.

    The caller has checked the rest with `declared.check`. `narrow`: dtype of both sides of the product, if
    not that of x. `kept`: rows of a CPU's earlier calls. A low-rank term multiplies the inputs before
    quantization, as in ModelOpt.
    """
    if weight.layer.transforms is not None:
        stored, how = weight.without_transforms(), (activations, maximum, narrow)
        return multiply_transformed(
            x, weight.layer.transforms, bias, lambda inputs, added: product(inputs, stored, added, *how)
        )
    if not quantizes(weight, activations):
        return products.multiply(x, weight, bias, weight.input_factors, narrow)
    factors = weight.input_factors
    scaled_x = x if factors is None else x.to(torch.promote_types(x.dtype, torch.float32)) * factors.float()
    if weight.low_rank is not None:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        coded = product(wide, weight.without_low_rank(), bias, activations, maximum, narrow or x.dtype)
        down, up = (factor.to(wide.dtype) for factor in weight.low_rank)
        return (coded + scaled_x.to(wide.dtype) @ down.T @ up.T).to(x.dtype)
    parts = [
        _multiply_part(
            (x.dtype, narrow or x.dtype), scaled_x, request, weight, rows,
            None if bias is None else bias[rows], kept,
        )
        for request, rows in declared.quantization_requests(scaled_x.detach(), weight, maximum)
    ]  # fmt: skip
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def multiply_transformed(
    x: Tensor,
    transforms: Transforms,
    bias: Tensor | None,
    multiply_coded: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """(..., K) -> (..., N) in x's dtype: transform of inputs, product with the codes, transform of outputs.

    Each transform has sums in float32 and one rounding.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if transforms.inputs is not None:
        x = transforms.inputs.apply(x.to(wide)).to(x.dtype)
    if transforms.outputs is None:
        return multiply_coded(x, bias)
    y = transforms.outputs.apply(multiply_coded(x, None).to(wide))
    return (y if bias is None else y + bias).to(x.dtype)


def _multiply_part(
    dtypes: tuple[torch.dtype, torch.dtype],
    x: Tensor,
    request: declared.QuantizationRequest,
    weight: Weight,
    rows: slice,
    bias: Tensor | None,
    kept: KeptRows | None,
) -> Tensor:
    """Product of quantized inputs and the outputs of a part; gradients pass the codes to x unchanged.

    `dtypes`: those of the result, and of both sides of the product.
    """
    part, within = weight, rows
    if can_cut(weight, rows.start, rows.stop):
        part, within = outputs(weight, rows.start, rows.stop), slice(None)
    elif bias is not None:
        bias = functional.pad(bias, (rows.start, weight.layer.N - rows.stop))
    if wants_gradients(x, bias):
        inputs: Tensor = _StraightThrough.apply(x, request.quantize().dequantize())  # type: ignore[no-untyped-call]
        return products.multiply(inputs, part, bias).to(dtypes[0])[:, within]
    whole = part is weight or part.shape == weight.shape
    return scaled.multiply(request.inputs(), part, bias, *dtypes, kept if whole else None)[:, within]


class _StraightThrough(torch.autograd.Function):
    """Quantized inputs, with the gradients of the inputs before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantized: Tensor) -> Tensor:
        return quantized.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _in_dtype_of(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """Return whether a plain weight and its bias have the dtype of x."""
    if any(tensor.dtype != x.dtype for tensor in weight.fields().values()):
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
    """Check that x is a float tensor (..., K) on the weight's device and `bias` (N,)."""
    check_tensors(weight, x, bias)
    name = weight.layer.name or type(weight).__name__
    if x.dtype not in WIDE:
        raise DtypeError(f"{name}: x", list(map(_dtype_name, WIDE)), _dtype_name(x.dtype))
    if bias is not None and tuple(bias.shape) != (weight.layer.N,):
        raise ShapeError(f"{name}: bias", f"({weight.layer.N},) = (N,)", tuple(bias.shape))
    if x.ndim == 0 or x.shape[-1] != weight.layer.K:
        raise ShapeError(f"{name}: x", f"(..., {weight.layer.K}) = (..., K)", tuple(x.shape))
    if x.device != weight.device:
        raise ArgumentError(f"{name}: x", f"a tensor on {weight.device}, as the weight", str(x.device))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wants_gradients(x: Tensor, bias: Tensor | None) -> bool:
    """Return whether autograd records x or a bias."""
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


class Plan(Protocol):
    """Native product with the tensors of one layer, for x of one device and dtype."""

    def multiply(self, x: Tensor, bias: Tensor | None, tensors: Sequence[Tensor]) -> Tensor | None:
        """(..., K) -> (..., N); None: `multiply` checks and does this call."""


class LinearSignature:
    """Format, config, shapes and dtypes of a linear layer, shared by all layers alike but for their names.

    A traced model cannot hold a typed weight: it holds the tensors, and the key. The key follows from the
    layer alone, not from its name or the order of modules: 32 blocks of a model are one graph, and a graph
    that another process stored finds its signature as soon as a module of the layer exists.

    Attributes
    ----------
    blueprint
        Typed weight on the meta device, without a name.
    names
        Its fields, in the order of a call's tensors.
    key
        Key in `known`.
    plain
        Whether torch's product with the only tensor is all there is to do.
    """

    def __init__(self, blueprint: Weight, activations: Activations, maximum: Maximum, key: str) -> None:
        self.blueprint, self.activations, self.maximum, self.key = blueprint, activations, maximum, key
        self.names = tuple(blueprint.fields())
        self._scheme = scheme_of(blueprint, activations)
        self.plain = blueprint.plain and self._scheme is None
        self._expected = tuple((tensor.shape, tensor.dtype) for tensor in blueprint.fields().values())
        self._cuda_plans: dict[tuple[int, torch.dtype], CudaPlan | None] = {}

    def way(self, device: str) -> str:
        """Way of products on a type of device."""
        return way_of(type(self.blueprint), self._scheme, device)

    def plan(
        self, x: Tensor, bias: Tensor | None, tensors: Sequence[Tensor], kept: KeptRows | None = None
    ) -> Plan | None:
        """Native plan for x, bias and tensors like these, or None."""
        way = self.way(x.device.type)
        if way == CPU_MODULE:
            return cpu.plan_of(with_tensors(self.blueprint, tensors), kept)
        on_cuda = way == CUDA_KERNELS or (way == QUANTIZED and x.is_cuda and not callable(self.maximum))
        if not on_cuda or not self.fits(x, bias, tensors):
            return None
        cell = x.get_device(), x.dtype
        if cell not in self._cuda_plans:
            declared.check(self.blueprint, self.activations, self.maximum)
            self._cuda_plans[cell] = plan_of(with_tensors(self.blueprint, tensors), x.dtype, self._scheme)
        return self._cuda_plans[cell]

    def fits(self, x: Tensor, bias: Tensor | None, tensors: Sequence[Tensor]) -> bool:
        """Return whether the tensors of a call are as native code expects."""
        index = x.get_device()
        for tensor, (shape, dtype) in zip(tensors, self._expected, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype or tensor.get_device() != index:
                return False
            if not tensor.is_contiguous():
                return False
        if bias is None:
            return True
        alike = bias.dtype == x.dtype and bias.get_device() == index
        return alike and bias.shape == (self.blueprint.layer.N,) and bias.is_contiguous()

    def multiply(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """(..., K) -> (..., N), without gradients."""
        plan = self.plan(x, bias, tensors) if x.is_cuda else None
        y = None if plan is None else plan.multiply(x, bias, tensors)
        if y is not None:
            return y
        return multiply(x, with_tensors(self.blueprint, tensors), bias, self.activations, self.maximum)

    def gradient(self, gradient: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Gradient of x (..., K) in the dtype of `gradient` (..., N): its product with the weight, in slices.

        Without regard to quantized inputs. Both sides are rounded to that dtype, sums are in float32.
        """
        weight = with_tensors(self.blueprint, tensors)
        rows = gradient.reshape(math.prod(gradient.shape[:-1]), weight.layer.N)
        with products.in_given_types(gradient):
            y = products.transposed(rows, weight, weight.input_factors)
        return y.reshape(*gradient.shape[:-1], weight.layer.K)


_KNOWN: dict[str, LinearSignature] = {}  # by key, until the process ends: graphs hold the keys


def known(key: str) -> LinearSignature:
    """Signature of a key; ArgumentError if no module of this process has it."""
    if key not in _KNOWN:
        raise ArgumentError("meaning", "that of a layer that this process has made", repr(key))
    return _KNOWN[key]


def signature_of(weight: Weight, activations: Activations, maximum: Maximum) -> LinearSignature:
    """Signature of a weight, shared by all layers like it, but for one with a function as `maximum`."""
    layer, (N, K), kind = weight.layer, weight.shape, type(weight)
    tensors = [(name, tuple(each.shape), str(each.dtype)) for name, each in weight.fields().items()]
    share = layer.parts, layer.K, layer.whole, layer.origin, layer.activations
    facts = kind.__module__, kind.__qualname__, weight.config, share, tensors, activations, maximum
    key = f"{weight.format} {N} x {K} {sha256(repr(facts).encode()).hexdigest()[:24]}"
    if key in _KNOWN and not callable(maximum):
        return _KNOWN[key]
    blueprint = without_tensors(weight)
    object.__setattr__(blueprint, "layer", replace(layer, name=""))
    signature = LinearSignature(blueprint, activations, maximum, key)
    return signature if callable(maximum) else _KNOWN.setdefault(key, signature)


def without_tensors(weight: Weight) -> Weight:
    """Copy on the meta device: shapes, dtypes, config and layer."""
    return weight.holding({name: tensor.to("meta") for name, tensor in weight.fields().items()})


def with_tensors(blueprint: Weight, tensors: Sequence[Tensor]) -> Weight:
    """Typed weight of `tensors`, one for each field of a blueprint in their order."""
    plain = [each.detach() if type(each) is torch.nn.Parameter else each for each in tensors]  # writes count
    return blueprint.holding(dict(zip(blueprint.fields(), plain, strict=True)))
