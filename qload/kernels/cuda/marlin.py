"""`qload::marlin`: x times a weight in Marlin's order, by the fastest kernel for so many tokens."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernels.cuda import decode, dispatch, large
from qload.kernels.cuda.dispatch import ACTIVATIONS, CudaKernel, KernelCall, every_call, kind_of
from qload.kernels.cuda.module import check_operands, operator
from qload.layouts import marlin


@dataclass(frozen=True)
class MarlinCall(KernelCall):
    """x (M, K) and a weight with padded rows and columns; `group_size` -1: one scale a column.

    `offset_zero`: zero point of all codes if the kernel subtracts offsets, which are then in `zeros`; -1: no
    offsets. `early`: a kernel may start before the one ahead of it has ended. `token_scales`: factors (M,) of
    the sums of tokens, in float32.
    """

    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    perm: Tensor | None
    bias: Tensor | None
    N: int
    bits: int
    group_size: int
    is_k_full: bool
    offset_zero: int = -1
    early: bool = field(default=True, kw_only=True)
    token_scales: Tensor | None = None

    layout: ClassVar[str] = "marlin"
    weight_type: ClassVar[type[GPTQMarlinWeight]] = GPTQMarlinWeight

    @property
    def rows(self) -> int:
        """K as it is padded."""
        return self.weights.shape[0] * 16

    @property
    def columns(self) -> int:
        """N as it is padded."""
        return self.weights.shape[1] * 2 // self.bits

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of the words for these `rows` and `columns`, in whole tiles."""
        rows, columns = self.rows // marlin.TILE_K, self.columns // marlin.TILE_N
        return rows, columns * marlin.TILE_N * self.bits // 2

    @property
    def code(self) -> int:
        """Number of the codes in csrc/cuda/device/code.h: of unsigned integers their width."""
        return self.bits

    @property
    def timed_as(self) -> int | str:
        """Name of the codes in the times of `hopper_gemm`."""
        return self.bits

    @property
    def group(self) -> int:
        """Rows of a group."""
        return self.rows if self.group_size == -1 else self.group_size

    @property
    def kind(self) -> str:
        """Kind of the layer in the table of kernels."""
        return kind_of(self.group, self.zeros is not None, self.is_wide)

    @property
    def is_wide(self) -> bool:
        """Return whether scales and offsets are float32."""
        return self.offset_zero >= 0 and self.scales.dtype == torch.float32


KERNELS = (
    CudaKernel("decode", decode.why_not, decode.run, decode.prepare),
    CudaKernel("large", every_call, large.run),
)


def linear(
    x: Tensor, weight: GPTQMarlinWeight, bias: Tensor | None = None, kernel: str = "", early: bool = True
) -> Tensor:
    """x (M, K) -> (M, N) in x's dtype, sums in float32; `kernel`: a name; "": the fastest for the call."""
    y: Tensor = torch.ops.qload.marlin(*arguments(x.contiguous(), weight, bias), asked=kernel, early=early)
    return y


def arguments(x: Tensor, weight: GPTQMarlinWeight, bias: Tensor | None = None) -> tuple[Any, ...]:
    """Arguments of a `MarlinCall`."""
    config = weight.config
    stored = weight.qweight, weight.scales, weight.qzeros, weight.g_idx, weight.perm
    return x, *stored, bias, weight.layer.N, config.bits, config.group_size, config.is_k_full


def multiply(kernels: tuple[CudaKernel, ...], call: MarlinCall, kernel: str) -> Tensor:
    """Check a call, and return its y (M, N) as `dispatch.multiply`."""
    check(call)
    return dispatch.multiply(kernels, call, kernel)


def _marlin(*read: Any, asked: str = "", early: bool = True) -> Tensor:
    return multiply(KERNELS, MarlinCall(*read, early=early), asked)


def check(call: MarlinCall) -> None:
    """Check a call; ArgumentError with the name of the wrong argument."""
    x, ints, size = call.x, (torch.int32,), call.group_size
    if call.bits not in (4, 8) or size not in (-1, 32, 64, 128):
        raise ArgumentError("group_size", "32, 64, 128 or -1 of 4 or 8 bits", f"{size} of {call.bits} bits")
    if call.weights.ndim != 2 or call.weights.shape != call.stored or call.rows % call.group:
        whole = f"whole tiles and groups of {size}"
        raise ArgumentError("weights", whole, f"shape {tuple(call.weights.shape)}")
    if (call.perm is None) != (call.g_idx is None) or not (call.is_k_full or call.g_idx is not None):
        raise ArgumentError("perm", "g_idx with it, and both where rows of groups are missing", "one of them")
    if not -1 <= call.offset_zero < 2**call.bits or (call.offset_zero >= 0 and call.zeros is None):
        expected = f"-1, or with offsets a code of {call.bits} bits"
        raise ArgumentError("offset_zero", expected, f"{call.offset_zero}, zeros {call.zeros is not None}")
    K, N = call.rows, call.columns
    groups = K // call.group if call.is_k_full else call.scales.shape[0]
    if call.is_wide and call.group >= K:
        raise ArgumentError("group_size", f"below {K} with scales in float32", str(size))
    dtype = torch.float32 if call.is_wide else x.dtype
    zeros = (dtype, N) if call.offset_zero >= 0 else (torch.int32, N * call.bits // 32)
    check_operands(
        x,
        ("x", x, ACTIVATIONS, tuple(x.shape)),
        ("weights", call.weights, ints, call.stored),
        ("scales", call.scales, (dtype,), (groups, N)),
        ("zeros", call.zeros, zeros[:1], (groups, zeros[1])),
        ("g_idx", call.g_idx, ints, (K,)),
        ("perm", call.perm, ints, (K,)),
        ("bias", call.bias, (x.dtype,), (call.N,)),
        ("token_scales", call.token_scales, (torch.float32,), (x.shape[0],)),
    )
    if x.ndim != 2 or not (0 < x.shape[1] <= K and 0 <= call.N <= N):
        raise ArgumentError("x", f"(M, K) of a layer of at most {K} x {N}", str(tuple(x.shape)))


def fake(x: Tensor, *rest: Any, **options: Any) -> Tensor:
    """The shape of y."""
    return x.new_empty(x.shape[0], rest[6])


SCHEMA = (
    "(Tensor x, Tensor weights, Tensor scales, Tensor? zeros, Tensor? g_idx, Tensor? perm, Tensor? bias, "
    'int N, int bits, int group_size, bool is_k_full, *, str asked="", bool early=True) -> Tensor'
)
operator("marlin", SCHEMA, _marlin, fake)
