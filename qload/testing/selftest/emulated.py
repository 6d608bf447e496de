"""Kernels of plain torch that read weights in the orders of real ones, to plant faults in.

qload selftest qload.testing.selftest.emulated:GPTQ
"""

from typing import Any, ClassVar

from torch import Tensor

from qload.errors import CastError, RepackError
from qload.kernel_formats import GPTQMarlinWeight, repack
from qload.layouts import Stored
from qload.spec import Weight
from qload.testing import emulators

# The orders that are tried, and how. Those of FP8 and NVFP4 round scales to the type of the activations, so
# that what their lanes read is not quite what a weight means.
ORDERS: tuple[tuple[str, dict[str, Any]], ...] = (("marlin", {}), ("exllama", {"zeros": Stored()}))
FLOATS = ("fp8", "modelopt_nvfp4")


def as_lanes_read(weight: Weight) -> Tensor:
    """The `weight` (N, K) float32 as the lanes of a kernel read it: of Marlin, else of ExLlama.

    What neither order holds, and floats of few bits, are dequantized.
    """
    (N, K), made = weight.shape, _in_an_order(weight)
    if made is None:
        return weight.dequantize()
    held: dict[str, Any] = made.fields()
    if isinstance(made, GPTQMarlinWeight):
        rows = emulators.marlin_weight(**held, bits=made.config.bits, is_k_full=made.config.is_k_full)
    else:
        rows = emulators.exllama_weight(**held, bits=made.codes().bits, zero_offset=0)
    return rows[:K, :N].T.float().contiguous()


def _in_an_order(weight: Weight) -> Weight | None:
    for layout, options in () if weight.format in FLOATS else ORDERS:
        try:
            return repack(weight, layout, **options)
        except (RepackError, CastError):
            continue  # the next order may hold it
    return None


class Emulated:
    """A kernel of one format."""

    format: ClassVar[str] = ""

    def pack(self, weight: Weight) -> Tensor:
        """What lanes read of a `weight`, (N, K)."""
        return as_lanes_read(weight)

    def gemm(self, x: Tensor, buffers: Tensor) -> Tensor:
        """Multiply x (M, K) by what `pack` made, in `buffers`, rounded to x's type -> y (M, N)."""
        return emulators.multiply(x, buffers.T.to(x.dtype))


class GPTQ(Emulated):
    """Symmetric ones, others, and act order."""

    format = "gptq"


class AWQ(Emulated):
    """With zero points."""

    format = "awq"


class CTPack(Emulated):
    """With bfloat16 scales."""

    format = "ct_pack"


class Fp8(Emulated):
    """With scales of blocks."""

    format = "fp8"


class NVFP4(Emulated):
    """With two scales."""

    format = "nvfp4"
