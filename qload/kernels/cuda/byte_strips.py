"""`qload::byte_strips`: x times FP8, MXFP8, int8, FP4 or nf4 in strips, by the fastest kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.formats import mxfp8
from qload.kernel_formats.fp4_strips import Fp4StripsConfig, Fp4StripsWeight
from qload.kernel_formats.fp8_strips import Fp8StripsConfig, Fp8StripsWeight
from qload.kernel_formats.int8_strips import Int8StripsConfig, Int8StripsWeight
from qload.kernel_formats.mxfp8_strips import Mxfp8StripsConfig, Mxfp8StripsWeight
from qload.kernel_formats.table_strips import TableStripsConfig, TableStripsWeight
from qload.kernels import products
from qload.kernels.cuda import decode, dispatch, hopper_gemm, mma_gemm, w8a8
from qload.kernels.cuda.dispatch import ACTIVATIONS, CudaKernel, KernelCall, every_call
from qload.kernels.cuda.module import check_operands, operator
from qload.layouts import strips
from qload.spec import ActivationScheme, Layer

ByteStripsWeight = (
    Fp8StripsWeight | Int8StripsWeight | Mxfp8StripsWeight | Fp4StripsWeight | TableStripsWeight
)
# Numbers of the codes in csrc/cuda/device/code.h.
INT8, E2M1, MXFP8 = w8a8.INT8, 0x304, 0x608
FP8: dict[str, int] = {"e4m3fn": w8a8.E4M3, "e5m2": 0x708}
TABLES: dict[str, int] = {"nf4": 0x404, "fp4": 0x504}
FP8_CODES: dict[int, Any] = {code: codes for codes, code in FP8.items()}
QUANT_TYPES: dict[int, Any] = {code: quant_type for quant_type, code in TABLES.items()}
GROUP_SIZES = {
    INT8: (0,),
    E2M1: (16, 32),
    MXFP8: (32,),
    **dict.fromkeys(FP8_CODES, (0, strips.TILE_K)),
    **dict.fromkeys(QUANT_TYPES, (64, 128)),
}
BYTE_SCALES = (E2M1, MXFP8)
CODE_NAMES: dict[int, str] = {**FP8_CODES, **QUANT_TYPES, INT8: "int8", E2M1: "e2m1", MXFP8: "mxfp8"}


@dataclass(frozen=True)
class ByteStripsCall(KernelCall):
    """x (M, K) and a weight with padded rows and columns.

    `group_size`: rows of a scale; 0: all. With FP8 64 columns share a scale of 128 rows. With scaled codes
    each column has scales of groups, and a scale of all rows in `column_scales`.
    `code`: number of the codes in csrc/cuda/device/code.h.
    `early`: a kernel may start before the one ahead of it has ended. `token_scales`: factors (M,) of the sums
    of tokens, in float32. `scheme`, `stored`: quantization of x before the product, and its stored scale.
    """

    scales: Tensor
    column_scales: Tensor | None
    bias: Tensor | None
    N: int
    code: int
    group_size: int
    early: bool = True
    token_scales: Tensor | None = None
    scheme: ActivationScheme | None = None
    stored: Tensor | None = None

    layout: ClassVar[str] = "strips"
    g_idx: ClassVar[None] = None
    perm: ClassVar[None] = None
    is_k_full: ClassVar[bool] = True

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.code & 0xFF

    @property
    def is_scaled(self) -> bool:
        """Return whether scales of groups multiply the codes, and not their sums."""
        return is_scaled(self.code)

    @property
    def kind(self) -> str:
        """Kind of the layer in the table of kernels."""
        if w8a8.why_not_scheme(self.code, self.scheme, self.x.shape[1]) is None:
            return w8a8.NAME
        return self.timed_as if isinstance(self.timed_as, str) else ""

    @property
    def timed_as(self) -> int | str:
        """Name of the codes in the times of `hopper_gemm`."""
        if self.code in QUANT_TYPES:
            return hopper_gemm.TABLE
        if self.code == E2M1:
            return hopper_gemm.E2M1
        return hopper_gemm.TILES if self.code in FP8_CODES and self.group_size else self.bits

    @property
    def zeros(self) -> Tensor | None:
        """Column scales, in the argument of a launch for zero points."""
        return self.column_scales

    @property
    def rows(self) -> int:
        """K as it is padded."""
        return self.weights.shape[1] // (2 * self.bits)

    @property
    def columns(self) -> int:
        """N as it is padded."""
        return self.weights.shape[0] * strips.TILE_N

    @property
    def group(self) -> int:
        """Rows that share a scale."""
        return self.group_size or max(self.rows, strips.TILE_K)

    def weight(self) -> ByteStripsWeight:
        """The weight without its padding."""
        layer = Layer((self.N,), self.x.shape[1], (self.N, self.x.shape[1]), "weight")
        tensors: dict[str, Tensor | None] = {"qweight": self.weights, "scales": self.scales}
        if self.is_scaled:
            tensors["column_scales"] = self.column_scales
        if self.code in QUANT_TYPES:
            table_config = TableStripsConfig(QUANT_TYPES[self.code], self.group_size)
            return TableStripsWeight.unchecked(table_config, layer, tensors)
        if self.code == E2M1:
            tensors |= {"second_scale": None, "input_scale": None}
            return Fp4StripsWeight.unchecked(Fp4StripsConfig(self.group_size), layer, tensors)
        if self.code == MXFP8:
            return Mxfp8StripsWeight.unchecked(Mxfp8StripsConfig(), layer, tensors)
        tensors |= {"weight_scale": self.scales, "input_scale": None}
        if self.code == INT8:
            tensors["input_zero_point"] = None
            return Int8StripsWeight.unchecked(Int8StripsConfig(), layer, tensors)
        config = Fp8StripsConfig(self.group_size > 0, FP8_CODES[self.code])
        return Fp8StripsWeight.unchecked(config, layer, tensors)


def _dequantize(call: ByteStripsCall) -> Tensor:
    return products.multiply(call.x, call.weight(), call.bias)


KERNELS = (
    CudaKernel("decode", decode.why_not, decode.run, decode.prepare),
    CudaKernel("many", hopper_gemm.why_not, hopper_gemm.run, hopper_gemm.prepare),
    CudaKernel(w8a8.NAME, w8a8.why_not, w8a8.run, w8a8.prepare),
    CudaKernel("mma", mma_gemm.why_not, mma_gemm.run, mma_gemm.prepare),
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
    column_scales = getattr(weight, "column_scales", None)
    code, group_size = code_of(weight.config)
    return x, weight.qweight, weight.scales, column_scales, bias, weight.layer.N, code, group_size


def code_of(config: Any) -> tuple[int, int]:
    """Return the code number (csrc/cuda/device/code.h) of a config, and the rows of a scale; 0: all rows."""
    if isinstance(config, Fp8StripsConfig):
        return FP8[config.codes], strips.TILE_K if config.blocks else 0
    if isinstance(config, Mxfp8StripsConfig):
        return MXFP8, mxfp8.GROUP
    if isinstance(config, Fp4StripsConfig):
        return E2M1, config.group_size
    if isinstance(config, TableStripsConfig):
        return TABLES[config.quant_type], config.group_size
    return INT8, 0


def is_scaled(code: int) -> bool:
    """Return whether scales of groups multiply the codes, and not their sums."""
    return code in BYTE_SCALES or code in QUANT_TYPES


def scales_of(code: int, K: int, N: int, group_size: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of the scales of a weight with padded K and N."""
    rows = strips.TILE_K
    if is_scaled(code):
        return torch.uint8 if code in BYTE_SCALES else torch.float32, (K // rows, N * (rows // group_size))
    return torch.float32, (K // rows, N // strips.TILE_N) if group_size else (N,)


def why_not_on(weight: ByteStripsWeight, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Reason why a chip of a capability cannot multiply a weight, wherever that is, or None."""
    reason = dispatch.why_not_capability(capability)
    if reason:
        return reason
    return None if dtype in ACTIVATIONS else f"needs float16 or bfloat16, got {dtype} activations"


def why_not(weight: ByteStripsWeight, dtype: torch.dtype) -> str | None:
    """Reason why activations of a dtype cannot be multiplied with a weight as it lies, or None."""
    return dispatch.why_not_device(weight.device) or why_not_on(
        weight, dtype, torch.cuda.get_device_capability(weight.device)
    )


def name_code(code: int) -> str:
    """Return the name of a code for messages; integers with groups are named by their bits."""
    return CODE_NAMES.get(code, f"{code} bits")


def check_group_size(argument: str, code: int, group_size: int, lawful: Mapping[int, Sequence[int]]) -> None:
    """Raise ArgumentError unless `group_size` is one of the `lawful` sizes of a code."""
    if group_size not in lawful.get(code, ()):
        expected = (f"{name_code(each)} with groups of {sizes}" for each, sizes in lawful.items())
        raise ArgumentError(argument, " or ".join(expected), f"{name_code(code)} with groups of {group_size}")


def check(call: ByteStripsCall) -> None:
    """Check a call; ArgumentError with the name of the wrong argument."""
    x, words, rows, columns, code = call.x, call.weights, strips.TILE_K, strips.TILE_N, call.code
    check_group_size("code", code, call.group_size, GROUP_SIZES)
    if words.ndim != 2 or words.shape[1] % (2 * call.bits * rows):
        raise ArgumentError(
            "weights", f"(N / {columns}, K * {2 * call.bits}) of whole tiles", str(tuple(words.shape))
        )
    K, N = call.rows, call.columns
    dtype, scales = scales_of(code, K, N, call.group_size)
    if call.is_scaled != (call.column_scales is not None):
        raise ArgumentError("column_scales", "a tensor with scaled codes, else None", name_code(code))
    check_operands(
        x,
        ("x", x, ACTIVATIONS, tuple(x.shape)),
        ("weights", words, (torch.int32,), tuple(words.shape)),
        ("scales", call.scales, (dtype,), scales),
        ("column_scales", call.column_scales, (torch.float32,), (N,)),
        ("bias", call.bias, (x.dtype,), (call.N,)),
        ("token_scales", call.token_scales, (torch.float32,), (x.shape[0],)),
    )
    if x.ndim != 2 or not (0 < x.shape[1] <= K and 0 <= call.N <= N):
        raise ArgumentError("x", f"(M, K) of a layer of at most {K} x {N}", str(tuple(x.shape)))


def _byte_strips(*read: Any, asked: str = "", early: bool = True) -> Tensor:
    call = ByteStripsCall(*(*read, early))
    check(call)
    return dispatch.multiply(KERNELS, call, asked)


def _fake(
    x: Tensor,
    weights: Tensor,
    scales: Tensor,
    column_scales: Tensor | None,
    bias: Tensor | None,
    N: int,
    *_: Any,
    **__: Any,
) -> Tensor:
    return x.new_empty(x.shape[0], N)


operator(
    "byte_strips",
    "(Tensor x, Tensor weights, Tensor scales, Tensor? column_scales, Tensor? bias, int N, int code, "
    'int group_size, *, str asked="", bool early=True) -> Tensor',
    _byte_strips,
    _fake,
)
