"""`qload::strips`: x times a weight in strips, by the fastest kernel for so many tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernel_formats.strips import StripsWeight
from qload.kernels.cuda import decode, hopper_gemm, large, marlin, mma_gemm
from qload.kernels.cuda.dispatch import CudaKernel, every_call
from qload.kernels.cuda.marlin import MarlinCall
from qload.kernels.cuda.module import operator
from qload.layouts import strips

ZEROS = ("qzeros", "offsets", "column_scales")  # tensors in the argument of a launch for zero points


@dataclass(frozen=True)
class StripsCall(MarlinCall):
    """As for Marlin's order; weights (N / 64, K * bits * 2)."""

    layout: ClassVar[str] = "strips"
    weight_type: ClassVar[type[GPTQMarlinWeight]] = StripsWeight

    @property
    def rows(self) -> int:
        """K as it is padded."""
        return self.weights.shape[1] // (2 * self.bits)

    @property
    def columns(self) -> int:
        """N as it is padded."""
        return self.weights.shape[0] * strips.TILE_N

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of the words for these `rows` and `columns`, in whole units."""
        return self.columns // strips.TILE_N, self.rows // strips.TILE_K * strips.TILE_K * 2 * self.bits


KERNELS = (
    CudaKernel("decode", decode.why_not, decode.run, decode.prepare),
    CudaKernel("many", hopper_gemm.why_not, hopper_gemm.run, hopper_gemm.prepare),
    CudaKernel("mma", mma_gemm.why_not, mma_gemm.run, mma_gemm.prepare),
    CudaKernel("large", every_call, large.run),
)


def linear(
    x: Tensor, weight: StripsWeight, bias: Tensor | None = None, kernel: str = "", early: bool = True
) -> Tensor:
    """x (M, K) -> (M, N) in x's dtype, sums in float32; `kernel`: a name; "": the fastest for the call."""
    y: Tensor = torch.ops.qload.strips(*arguments(x.contiguous(), weight, bias), asked=kernel, early=early)
    return y


def arguments(x: Tensor, weight: StripsWeight, bias: Tensor | None = None) -> tuple[Any, ...]:
    """Arguments of a `StripsCall`."""
    x, words, scales, zeros, *rest = marlin.arguments(x, weight, bias)
    if weight.offsets is None:
        return x, words, scales, zeros, *rest, -1
    return x, words, scales, weight.offsets, *rest, weight.config.zero


def _strips(*read: Any, asked: str = "", early: bool = True) -> Tensor:
    return marlin.multiply(KERNELS, StripsCall(*read, early=early), asked)


SCHEMA = marlin.SCHEMA.replace("bool is_k_full", "bool is_k_full, int offset_zero=-1")
operator("strips", SCHEMA, _strips, marlin.fake)
