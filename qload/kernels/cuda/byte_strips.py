"""`qload::byte_strips`: x times FP8 or int8 in strips, by the fastest kernel for so many tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernel_formats.fp8_strips import BITS, Fp8StripsConfig, Fp8StripsWeight
from qload.kernel_formats.int8_strips import Int8StripsConfig, Int8StripsWeight
from qload.kernels import products
from qload.kernels.cuda import decode, dispatch, hopper_gemm
from qload.kernels.cuda.dispatch import ACTIVATIONS, CudaKernel, KernelCall, every_call
from qload.kernels.cuda.launch import HOPPER
from qload.kernels.cuda.module import check_operands, operator
from qload.layouts import strips
from qload.spec import Layer

ByteStripsWeight = Fp8StripsWeight | Int8StripsWeight
INT8, E4M3 = 0x108, 0x208  # numbers of the codes in csrc/cuda/device/code.h


@dataclass(frozen=True)
class ByteStripsCall(KernelCall):
    """x (M, K) and a weight with padded rows and columns; `blocks`: scales are per tile, else per column.

    `code`: number of the codes in csrc/cuda/device/code.h.
    `early`: a kernel may start before the one ahead of it has ended.
    """

    scales: Tensor
    bias: Tensor | None
    N: int
    code: int
    blocks: bool
    early: bool = True

    layout: ClassVar[str] = "strips"
    bits: ClassVar[int] = BITS
    zeros: ClassVar[None] = None
    g_idx: ClassVar[None] = None
    perm: ClassVar[None] = None
    is_k_full: ClassVar[bool] = True

    @property
    def rows(self) -> int:
        """K as it is padded."""
        return self.weights.shape[1] // (2 * BITS)

    @property
    def columns(self) -> int:
        """N as it is padded."""
        return self.weights.shape[0] * strips.TILE_N

    @property
    def group(self) -> int:
        """Rows that share a scale."""
        return strips.TILE_K if self.blocks else max(self.rows, strips.TILE_K)

    def weight(self) -> ByteStripsWeight:
        """The weight without its padding."""
        layer = Layer((self.N,), self.x.shape[1], (self.N, self.x.shape[1]), "weight")
        scales = dict.fromkeys(("scales", "weight_scale"), self.scales)
        tensors: dict[str, Tensor | None] = {"qweight": self.weights, **scales}
        if self.code == INT8:
            return Int8StripsWeight.unchecked(Int8StripsConfig(), layer, tensors)
        return Fp8StripsWeight.unchecked(
            Fp8StripsConfig(self.blocks), layer, {**tensors, "input_scale": None}
        )


def _dequantize(call: ByteStripsCall) -> Tensor:
    return products.multiply(call.x, call.weight(), call.bias)


KERNELS = (
    CudaKernel("decode", decode.why_not, decode.run, decode.prepare),
    CudaKernel("many", hopper_gemm.why_not, hopper_gemm.run, hopper_gemm.prepare),
    CudaKernel("large", every_call, _dequantize),
)


def linear(
    x: Tensor, weight: ByteStripsWeight, bias: Tensor | None = None, kernel: str = "", early: bool = True
) -> Tensor:
    """x (M, K) -> (M, N) in x's dtype, sums in float32; `kernel`: a name; "": the fastest for the call."""
    read = arguments(x.contiguous(), weight, bias)
    y: Tensor = torch.ops.qload.byte_strips(*read, asked=kernel, early=early)
    return y


def arguments(x: Tensor, weight: ByteStripsWeight, bias: Tensor | None = None) -> tuple[Any, ...]:
    """Arguments of a `ByteStripsCall`."""
    is_fp8 = isinstance(weight, Fp8StripsWeight)
    blocks = isinstance(weight, Fp8StripsWeight) and weight.config.blocks
    return x, weight.qweight, weight.scales, bias, weight.layer.N, E4M3 if is_fp8 else INT8, blocks


def why_not_on(weight: ByteStripsWeight, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Reason why a chip of a capability cannot multiply a weight, wherever that is, or None."""
    if capability[0] < HOPPER:
        return f"needs a CUDA device of capability {HOPPER}.0, got {capability[0]}.{capability[1]}"
    return None if dtype in ACTIVATIONS else f"needs float16 or bfloat16, got {dtype} activations"


def why_not(weight: ByteStripsWeight, dtype: torch.dtype) -> str | None:
    """Reason why activations of a dtype cannot be multiplied with a weight as it lies, or None."""
    return dispatch.why_not_device(weight.device) or why_not_on(
        weight, dtype, torch.cuda.get_device_capability(weight.device)
    )


def check(call: ByteStripsCall) -> None:
    """Check a call; ArgumentError with the name of the wrong argument."""
    x, words, rows, columns = call.x, call.weights, strips.TILE_K, strips.TILE_N
    if call.code not in (INT8, E4M3) or (call.code == INT8 and call.blocks):
        raise ArgumentError("code", f"{E4M3}, or {INT8} without blocks", str(call.code))
    if words.ndim != 2 or words.shape[1] % (2 * BITS * rows):
        raise ArgumentError(
            "weights", f"(N / {columns}, K * {2 * BITS}) of whole tiles", str(tuple(words.shape))
        )
    K, N = call.rows, call.columns
    check_operands(
        x,
        ("x", x, ACTIVATIONS, tuple(x.shape)),
        ("weights", words, (torch.int32,), tuple(words.shape)),
        ("scales", call.scales, (torch.float32,), (K // rows, N // columns) if call.blocks else (N,)),
        ("bias", call.bias, (x.dtype,), (call.N,)),
    )
    if x.ndim != 2 or not (0 < x.shape[1] <= K and 0 <= call.N <= N):
        raise ArgumentError("x", f"(M, K) of a layer of at most {K} x {N}", str(tuple(x.shape)))


def _byte_strips(*read: Any, asked: str = "", early: bool = True) -> Tensor:
    call = ByteStripsCall(*(*read, early))
    check(call)
    return dispatch.multiply(KERNELS, call, asked)


def _fake(
    x: Tensor, weights: Tensor, scales: Tensor, bias: Tensor | None, N: int, *_: Any, **__: Any
) -> Tensor:
    return x.new_empty(x.shape[0], N)


operator(
    "byte_strips",
    "(Tensor x, Tensor weights, Tensor scales, Tensor? bias, int N, int code, bool blocks, *, "
    'str asked="", bool early=True) -> Tensor',
    _byte_strips,
    _fake,
)
