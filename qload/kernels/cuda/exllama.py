"""`qload::exllama`: x times a weight in ExLlama's order, by the fastest kernel for so many tokens."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernel_formats.exllama import ExllamaConfig, ExllamaWeight
from qload.kernels import products
from qload.kernels.cuda import dispatch
from qload.kernels.cuda.dispatch import ACTIVATIONS, CudaKernel, KernelCall, every_call, known, multiply
from qload.kernels.cuda.launch import gathered
from qload.kernels.cuda.module import check_operands, native, operator, pointer, stream
from qload.kernels.products import GPU_SLICE_BYTES, OUTPUT_MULTIPLE
from qload.layouts import (
    STORED_MINUS_ONE,
    Stored,
    StoredMinusOnePerField,
    StoredMinusOneUnmasked,
    ZeroPoints,
)
from qload.spec import Layer

BITS = (2, 3, 4, 8)
MOST_TOKENS = 64
GATHERED = 2  # tokens from which on x is put in order ahead of the kernel, which could read it out of order
ZEROS: dict[str, ZeroPoints] = {
    kind.name: kind
    for kind in (Stored(), STORED_MINUS_ONE, StoredMinusOnePerField(), StoredMinusOneUnmasked())
}


@dataclass(frozen=True)
class ExllamaCall(KernelCall):
    """x (M, K) and a weight; `convention`: name of the convention of its zero points.

    `run`: rows of a group, where g_idx only counts; 0: it has to be looked at.
    `early`: a kernel may start before the one ahead of it has ended.
    """

    zeros: Tensor
    scales: Tensor
    g_idx: Tensor
    perm: Tensor | None
    bias: Tensor | None
    bits: int
    convention: str
    run: int = 0
    early: bool = True

    layout: ClassVar[str] = "exllama"

    @property
    def N(self) -> int:
        """Columns."""
        return self.weights.shape[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """K, N, and how many groups."""
        return self.weights.shape[0] * 32 // self.bits, self.N, self.scales.shape[0]


def why_not_few(call: ExllamaCall) -> str | None:
    """Why the kernel of csrc/cuda/exllama does not take a call, or None."""
    return None if call.tokens <= MOST_TOKENS else f"takes at most {MOST_TOKENS} tokens, got {call.tokens}"


def multiply_few(call: ExllamaCall, columns: int = 0, split: int = 0) -> Tensor:
    """y (M, N); a division of 0 is left to the kernel."""
    if call.perm is not None and call.tokens >= GATHERED and call.shape[0] % 8 == 0:
        call = replace(call, x=gathered(call.x, call.perm, call.early), perm=None)
    y: Tensor = call.x.new_empty(call.tokens, call.N)
    write_few(y, call, columns, split)
    return y


def write_few(y: Tensor, call: ExllamaCall, columns: int = 0, split: int = 0) -> None:
    """`multiply_few` to given memory, without checks."""
    x, (K, N, groups) = call.x, call.shape
    weights, scales = map(_aligned, (call.weights, call.scales))
    rule = ZEROS[call.convention].rule(call.bits)
    with torch.cuda.device(x.device):
        native().exllama(
            *map(pointer, (x, weights, call.zeros, scales, call.g_idx, call.perm, call.bias, y)),
            [x.shape[0], K, N, groups],
            call.bits,
            max(1, -(-K // max(groups, 1))),
            [rule.add_to_word, rule.add, rule.mask],
            x.dtype == torch.bfloat16,
            columns,
            split,
            call.early and weights is call.weights and scales is call.scales,
            stream(x),
        )


def large(call: ExllamaCall, scratch: int = GPU_SLICE_BYTES) -> Tensor:
    """The weight rounded to the type of x, its rows as they lie, then the vendor's product.

    `scratch`: bytes of the rounded weight at once, but no fewer than `OUTPUT_MULTIPLE` columns.
    """
    (K, N, _), x = call.shape, call.x
    if call.perm is not None:
        x = x.index_select(1, call.perm) if K % 8 else gathered(x, call.perm, call.early)
    if call.bits == 3:
        return _large_of_three(call, x, scratch)
    config = ExllamaConfig(call.bits, ZEROS[call.convention], call.run)
    layer = Layer((N,), K, (N, K), "weight")
    held = {"qweight": call.weights, "qzeros": call.zeros, "scales": call.scales, "g_idx": call.g_idx}
    weight = ExllamaWeight.unchecked(config, layer, held)
    return products.in_slices(x, weight, call.bias, scratch=scratch)


def _large_of_three(call: ExllamaCall, x: Tensor, scratch: int) -> Tensor:
    """`large` for 3 bits, with codes across words: a kernel dequantizes some columns at a time."""
    K, N, _ = call.shape
    columns = max(
        OUTPUT_MULTIPLE, scratch // max(K * x.element_size(), 1) // OUTPUT_MULTIPLE * OUTPUT_MULTIPLE
    )
    y: Tensor = x.new_empty(x.shape[0], N)
    for start in range(0, N, columns):
        part = slice(start, min(start + columns, N))
        products.write_product(
            y[:, part], x, _rounded(call, part), None if call.bias is None else call.bias[part]
        )
    return y


def _rounded(call: ExllamaCall, columns: slice) -> Tensor:
    """Some columns (n, K) in the type of x, rows in storage order; a view of (K, n)."""
    x, (K, N, _) = call.x, call.shape
    weights, scales = map(_aligned, (call.weights, call.scales))
    rule = ZEROS[call.convention].rule(call.bits)
    w: Tensor = x.new_empty(K, columns.stop - columns.start)
    with torch.cuda.device(x.device):
        native().rounded_three(
            *map(pointer, (weights, call.zeros, scales, call.g_idx, w)),
            [K, N, columns.start, w.shape[1]],
            [rule.add_to_word, rule.add, rule.mask],
            x.dtype == torch.bfloat16,
            stream(x),
        )
    return w.T


KERNELS = (CudaKernel("few", why_not_few, multiply_few), CudaKernel("large", every_call, large))


def why_not(weight: ExllamaWeight, dtype: torch.dtype) -> str | None:
    """Why activations of a dtype are not multiplied with a weight as it lies, or None."""
    reason = dispatch.why_not(weight, dtype)
    return reason or why_not_on(weight, dtype, torch.cuda.get_device_capability(weight.device))


def why_not_on(weight: ExllamaWeight, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Reason why a chip of a capability cannot multiply a weight, wherever that is, or None."""
    reason, config = dispatch.why_not_on(weight, dtype, capability), weight.config
    if reason:
        return reason
    if config.bits not in BITS or config.zeros.name not in ZEROS:
        return f"reads 2, 3, 4 and 8 bits, got {config.bits} with zero points {config.zeros.name}"
    if not known(ExllamaCall.layout, config.bits, capability):
        return f"no kernel of {config.bits} bits was timed on such a device: see docs/lab/exllama.md"
    return None


def linear(
    x: Tensor, weight: ExllamaWeight, bias: Tensor | None = None, kernel: str = "", early: bool = True
) -> Tensor:
    """x (M, K) -> (M, N) in x's dtype, sums in float32; `kernel`: a name; "": the fastest for the call."""
    early = early and weight.g_idx.dtype == torch.int32  # else it is made just before
    y: Tensor = torch.ops.qload.exllama(*arguments(x.contiguous(), weight, bias), asked=kernel, early=early)
    return y


def arguments(x: Tensor, weight: ExllamaWeight, bias: Tensor | None = None) -> tuple[Any, ...]:
    """Arguments of an `ExllamaCall`."""
    stored = weight.qweight, weight.qzeros, weight.scales, weight.g_idx.to(torch.int32), weight.q_perm
    return x, *stored, bias, weight.config.bits, weight.config.zeros.name, weight.config.run


def _exllama(*read: Any, asked: str = "", early: bool = True) -> Tensor:
    return multiply(KERNELS, checked(replace(ExllamaCall(*read), early=early)), asked)


def checked(call: ExllamaCall) -> ExllamaCall:
    """Check a call and return it; ArgumentError with the name of the wrong argument."""
    x, ints = call.x, (torch.int32,)
    if call.bits not in BITS:
        raise ArgumentError("bits", "2, 3, 4 or 8", str(call.bits))
    if call.convention not in ZEROS:
        raise ArgumentError("convention", " or ".join(ZEROS), repr(call.convention))
    K, N, groups = call.shape
    check_operands(
        x,
        ("x", x, ACTIVATIONS, (call.tokens, K)),
        ("weights", call.weights, ints, (K * call.bits // 32, N)),
        ("zeros", call.zeros, ints, (groups, N * call.bits // 32)),
        ("scales", call.scales, (x.dtype,), (groups, N)),
        ("g_idx", call.g_idx, ints, (K,)),
        ("perm", call.perm, ints, (K,)),
        ("bias", call.bias, (x.dtype,), (N,)),
    )
    if call.run < 0 or (call.run and -(-K // call.run) > groups):
        raise ArgumentError("run", f"0, or rows of {groups} groups of {K} rows", str(call.run))
    if K and not groups:
        raise ArgumentError("scales", "a group for each row", "no group")
    if N * call.bits % 32:
        raise ArgumentError("zeros", f"whole words of zero points, {call.bits} bits each", f"{N} columns")
    return call


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _fake(x: Tensor, weights: Tensor, *rest: Any, **options: Any) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[1])


operator(
    "exllama",
    "(Tensor x, Tensor weights, Tensor zeros, Tensor scales, Tensor g_idx, Tensor? perm, Tensor? bias, "
    'int bits, str convention, int run=0, *, str asked="", bool early=True) -> Tensor',
    _exllama,
    _fake,
)
