"""Products of x and a typed weight on a CUDA device, by the kernels of its layout.

`linear` chooses the kernel at each call. A `CudaPlan` chooses it at the first call with a number of tokens,
by the same table, checks and kernels; a later call is memory for y, addresses, and one routine of the module.

Inputs that a weight declares quantized are rounded by one launch ahead, to 16-bit numbers and a factor of
each token (`cuda.quantize.RoundedInputs`); the kernel of the undeclared call multiplies the numbers, and its
sums in float32 by the factors. `why_not_declared` has the one rule. `w8a8` takes codes of 8 bits instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qload.kernel_formats.exllama import ExllamaWeight
from qload.kernel_formats.fp4_strips import Fp4StripsWeight
from qload.kernel_formats.fp8_strips import Fp8StripsWeight
from qload.kernel_formats.int8_strips import Int8StripsWeight
from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernel_formats.mxfp8_strips import Mxfp8StripsWeight
from qload.kernel_formats.strips import StripsWeight
from qload.kernel_formats.table_strips import TableStripsWeight
from qload.kernels.cuda import byte_strips, dispatch, exllama, marlin, strips, w8a8
from qload.kernels.cuda.dispatch import CudaKernel, KernelCall, choose
from qload.kernels.cuda.launch import ALIGNED, Launch
from qload.kernels.cuda.module import current_device, empty_rows, native, raw_stream, why_not
from qload.kernels.cuda.quantize import STORED_DTYPES, RoundedInputs, group_of, reads_stored, takes
from qload.spec import ActivationScheme, Weight

PLANNED = (  # kernels are one launch
    StripsWeight,
    GPTQMarlinWeight,
    Fp8StripsWeight,
    Int8StripsWeight,
    Mxfp8StripsWeight,
    Fp4StripsWeight,
    TableStripsWeight,
)
MAX_LAUNCHES = 1 << 14  # numbers of tokens with a remembered launch
ALIGNMENT_BITS = ALIGNED - 1  # bits of an address between two aligned ones


@dataclass(frozen=True)
class LinearOperator:
    """Operator for weights of one type.

    Attributes
    ----------
    why_not
        Reason why a weight and a dtype of activations cannot be multiplied, or None.
    linear
        Product y (M, N) of x (M, K), weight and bias.
    kernels
        Kernels to choose from.
    call, arguments
        Arguments of a kernel, from x and a weight.
    check
        Check of a call, which raises ArgumentError; by default every call is right.
    why_not_on
        `why_not` for a chip with a compute capability, which need not be in this machine.
    scales_tokens
        Whether kernels that are one launch multiply the sums of tokens by factors.
    takes_codes
        Whether a kernel may multiply quantized inputs as codes of 8 bits.
    """

    why_not: Callable[[Any, torch.dtype], str | None]
    linear: Callable[..., Tensor]
    kernels: tuple[CudaKernel, ...]
    call: Callable[..., KernelCall]
    arguments: Callable[..., tuple[Any, ...]]
    check: Callable[[Any], object] = dispatch.every_call
    why_not_on: Callable[[Any, torch.dtype, tuple[int, int]], str | None] = dispatch.why_not_on
    scales_tokens: bool = False
    takes_codes: bool = False


BYTE_STRIPS = LinearOperator(
    byte_strips.why_not,
    byte_strips.linear,
    byte_strips.KERNELS,
    byte_strips.ByteStripsCall,
    byte_strips.arguments,
    byte_strips.check,
    byte_strips.why_not_on,
    scales_tokens=True,
    takes_codes=True,
)
OPERATORS: dict[type[Weight], LinearOperator] = {
    ExllamaWeight: LinearOperator(
        exllama.why_not,
        exllama.linear,
        exllama.KERNELS,
        exllama.ExllamaCall,
        exllama.arguments,
        exllama.checked,
        exllama.why_not_on,
    ),
    GPTQMarlinWeight: LinearOperator(
        dispatch.why_not, marlin.linear, marlin.KERNELS, marlin.MarlinCall, marlin.arguments, marlin.check
    ),
    StripsWeight: LinearOperator(
        dispatch.why_not,
        strips.linear,
        strips.KERNELS,
        strips.StripsCall,
        strips.arguments,
        marlin.check,
        scales_tokens=True,
    ),
    Fp8StripsWeight: BYTE_STRIPS,
    Int8StripsWeight: BYTE_STRIPS,
    Mxfp8StripsWeight: BYTE_STRIPS,
    Fp4StripsWeight: BYTE_STRIPS,
    TableStripsWeight: BYTE_STRIPS,
}


def why_not_linear(weight: Weight, dtype: torch.dtype) -> str | None:
    """Reason why activations of a dtype cannot be multiplied with a weight on its device, or None."""
    operator = OPERATORS.get(type(weight))
    if operator is None:
        return missing_kernel(type(weight))
    return why_not() or operator.why_not(weight, dtype)


def missing_kernel(weight_type: type[Weight]) -> str:
    """Reason for a type of weights without CUDA kernels."""
    return f"no CUDA kernel reads {weight_type.__name__}"


def can_multiply(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """Return whether `linear` multiplies a call: a supported weight, a bias in x's dtype, no gradients."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    same = bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    return same and not wanted and why_not_linear(weight, x.dtype) is None


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, **options: Any) -> Tensor:
    """(..., K) -> (..., N) in x's dtype, sums in float32; `can_multiply` is the caller's to ask."""
    N, K = weight.shape
    y = OPERATORS[type(weight)].linear(x.reshape(-1, K), weight, bias, **options)
    return y.reshape(*x.shape[:-1], N)


def scales_tokens(weight: Weight) -> bool:
    """Return whether kernels of a weight's type multiply the sums of tokens by factors."""
    operator = OPERATORS.get(type(weight))
    return operator is not None and operator.scales_tokens


def why_not_declared(weight: Weight, scheme: ActivationScheme) -> str | None:
    """Reason why no launch ahead rounds inputs by a scheme for the kernels of a weight, or None."""
    tensors = weight.fields()
    if not scales_tokens(weight):
        return f"no kernel of {type(weight).__name__} takes factors of tokens"
    if weight.input_factors is not None:
        return "inputs have factors"
    if not takes(scheme, weight.layer.K):
        return f"no launch rounds {weight.layer.K} inputs by {scheme}"
    stored = [tensors.get(name) for name in (scheme.scale, scheme.zero_point) if name]
    if any(each is None or each.numel() > 1 or each.dtype not in STORED_DTYPES for each in stored):
        return "stored scales of inputs are not one number in float32, float16 or bfloat16"
    return None


def multiply_rounded(x: Tensor, token_scales: Tensor, weight: Weight, bias: Tensor | None) -> Tensor | None:
    """Product of rounded x (M, K) and a weight, each token's sums times its factor; None without a kernel.

    `token_scales`: (M,), float32. The result has x's dtype.
    """
    if not scales_tokens(weight) or not can_multiply(x, weight, bias) or not x.numel():
        return None
    operator = OPERATORS[type(weight)]
    call: Any = operator.call(*operator.arguments(x, weight, bias), token_scales=token_scales)
    operator.check(call)
    capability = torch.cuda.get_device_capability(x.device)
    kernel = choose(operator.kernels, call, layout=call.layout, capability=capability)
    return None if kernel.prepare is None else kernel.run(call)


def multiply_codes(
    x: Tensor, scheme: ActivationScheme, stored: Tensor | None, weight: Weight, bias: Tensor | None
) -> Tensor | None:
    """Product of x (M, K), quantized by a scheme to codes, and a weight; None if no such kernel is fastest.

    `stored`: the scheme's stored scale (1,), or None.
    """
    operator = OPERATORS.get(type(weight))
    if operator is None or not operator.takes_codes or not can_multiply(x, weight, bias) or not x.numel():
        return None
    call = call_of(x.contiguous(), weight, bias, scheme, stored)
    operator.check(call)
    capability = torch.cuda.get_device_capability(x.device)
    kernel = choose(operator.kernels, call, layout=call.layout, capability=capability)
    return kernel.run(call) if kernel.name == w8a8.NAME else None


def call_of(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    scheme: ActivationScheme | None = None,
    stored: Tensor | None = None,
) -> Any:
    """Arguments of a kernel for x and a weight; `scheme`, `stored`: quantization of x, for codes."""
    operator = OPERATORS[type(weight)]
    quantization = {"scheme": scheme, "stored": stored} if operator.takes_codes else {}
    return operator.call(*operator.arguments(x, weight, bias), **quantization)


def able(x: Tensor, weight: Weight) -> list[str]:
    """Names of the usable kernels for x and a weight."""
    call = call_of(x, weight)
    return [kernel.name for kernel in OPERATORS[type(weight)].kernels if kernel.why_not(call) is None]


class CudaPlan:
    """Plan of products of x, of one dtype on one device, with all layers like `weight`, inputs in order.

    `scheme`: quantization of the inputs, or None. A plan keeps shapes and types, no tensors.
    """

    def __init__(self, weight: Weight, dtype: torch.dtype, scheme: ActivationScheme | None = None) -> None:
        self._blueprint = weight.holding({name: each.to("meta") for name, each in weight.fields().items()})
        self._names = list(weight.fields())
        self._index = weight.device.index
        self._capability = torch.cuda.get_device_capability(weight.device)
        self.dtype, (self.N, self.K) = dtype, weight.shape
        self._codes, self._scales = self._names.index("qweight"), self._names.index("scales")
        self._zeros = next((self._names.index(name) for name in strips.ZEROS if name in self._names), None)
        self._launches: dict[int, Launch | None] = {}  # by tokens; None: more than one launch
        self._scheme = scheme
        self._rounded: RoundedInputs | None = None  # of 16 bits
        self._coded: RoundedInputs | None = None
        self._stored: list[int | None] = []  # places of the stored scale and zero point
        if scheme is not None:
            names = (scheme.scale, scheme.zero_point) if reads_stored(scheme) else (None, None)
            self._stored = [self._names.index(name) if name else None for name in names]
            dtypes = [weight.fields()[name].dtype if name else None for name in names]
            self._rounded = RoundedInputs(native(), dtype, self.K, scheme, dtypes)
            if OPERATORS[type(weight)].takes_codes and not group_of(scheme, self.K):
                self._coded = RoundedInputs(native(), dtype, self.K, scheme, dtypes, coded=True)

    def multiply(self, x: Tensor, bias: Tensor | None, tensors: Sequence[Tensor]) -> Tensor | None:
        """(..., K) -> (..., N), or None if one launch is not enough, and one for quantized inputs.

        x has this plan's dtype and device; `tensors` and `bias` have the layer's shapes and dtypes, and are
        contiguous.
        """
        shape, K = x.shape, self.K
        if not shape or shape[-1] != K:
            return None
        tokens = shape.numel() // K if K else 0
        known = tokens in self._launches
        launch = self._launches[tokens] if known else self._choose(x, tokens, tensors, bias)
        if launch is None:
            return None
        if current_device() == self._index:
            return self._start(launch, x, tokens, tensors, bias)
        with torch.cuda.device(self._index):
            return self._start(launch, x, tokens, tensors, bias)

    def _start(
        self, launch: Launch, x: Tensor, tokens: int, tensors: Sequence[Tensor], bias: Tensor | None
    ) -> Tensor | None:
        whole = x if x.is_contiguous() else x.contiguous()
        at, codes, scales = (
            whole.data_ptr(),
            tensors[self._codes].data_ptr(),
            tensors[self._scales].data_ptr(),
        )
        zeros = 0 if self._zeros is None else tensors[self._zeros].data_ptr()
        if (at | codes | scales | zeros) & ALIGNMENT_BITS:
            return None
        stream, factors = raw_stream(self._index), 0
        rounding = self._coded if launch.coded else self._rounded
        if rounding is not None:
            scale, zero = (0 if place is None else tensors[place].data_ptr() for place in self._stored)
            rounded, factors = rounding.start(whole, tokens, scale, zero, stream)
            at = rounded.data_ptr()
        flat = x.ndim == 2  # as most are
        y = empty_rows(x, tokens, self.N) if flat else x.new_empty((*x.shape[:-1], self.N))
        parts = x.new_empty(launch.scratch, dtype=torch.float32) if launch.scratch else None
        launch.start(
            at, codes, scales, zeros, 0, 0 if parts is None else parts.data_ptr(),
            0 if bias is None else bias.data_ptr(), factors, y.data_ptr(), stream,
        )  # fmt: skip
        return y

    def _choose(
        self, x: Tensor, tokens: int, tensors: Sequence[Tensor], bias: Tensor | None
    ) -> Launch | None:
        launch: Launch | None = None
        if tokens and self.N:
            weight: Any = self._blueprint.holding(dict(zip(self._names, tensors, strict=True)))
            operator, rows = OPERATORS[type(weight)], x.reshape(-1, self.K).contiguous()
            call = call_of(rows, weight, bias, self._scheme)
            operator.check(call)
            kernel = choose(operator.kernels, call, layout=call.layout, capability=self._capability)
            launch = None if kernel.prepare is None else kernel.prepare(call, rows)
        if len(self._launches) >= MAX_LAUNCHES:
            self._launches.clear()
        self._launches[tokens] = launch
        return launch


def plan_of(weight: Weight, dtype: torch.dtype, scheme: ActivationScheme | None = None) -> CudaPlan | None:
    """Plan for layers like `weight` and activations of a dtype; None: `linear` multiplies, or torch.

    `scheme`: quantization of the inputs, or None.
    """
    if type(weight) not in PLANNED or why_not_linear(weight, dtype) is not None or raw_stream is None:
        return None
    has_groups = getattr(weight.config, "is_k_full", True)  # of whole groups, and no others
    whole = has_groups and "perm" not in weight.fields() and weight.layer.K % 8 == 0
    if not whole or (scheme is not None and why_not_declared(weight, scheme) is not None):
        return None
    return CudaPlan(weight, dtype, scheme)
