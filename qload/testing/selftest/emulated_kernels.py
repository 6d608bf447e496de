"""Kernels of plain torch that read weights in the orders of real kernels, as targets for planted faults.

qload selftest qload.testing.selftest.emulated_kernels:GPTQ
"""

from typing import Any, ClassVar

from torch import Tensor

from qload.errors import CastError, RepackError
from qload.kernel_formats import GPTQMarlinWeight, repack
from qload.layouts import Stored
from qload.spec import Weight
from qload.testing import emulators

# Layouts and their options, in the order of trial. FP8 and NVFP4 have none: their layouts round scales to the
# type of the activations, and an emulated kernel would multiply by slightly different numbers.
LAYOUTS: tuple[tuple[str, dict[str, Any]], ...] = (("marlin", {}), ("exllama", {"zeros": Stored()}))
DEQUANTIZED_FORMATS = ("fp8", "modelopt_nvfp4")


def emulated_weight(weight: Weight) -> Tensor:
    """Return a `weight`, float32 (N, K), as the lanes of a kernel read it in Marlin's order, or in ExLlama's.

    Weights that neither order holds, and floats of few bits, are dequantized.
    """
    (N, K), repacked = weight.shape, _repacked(weight)
    if repacked is None:
        return weight.dequantize()
    fields: dict[str, Any] = repacked.fields()
    if isinstance(repacked, GPTQMarlinWeight):
        config = repacked.config
        rows = emulators.marlin_weight(**fields, bits=config.bits, is_k_full=config.is_k_full)
    else:
        rows = emulators.exllama_weight(**fields, bits=repacked.codes().bits, zero_offset=0)
    return rows[:K, :N].T.float().contiguous()


def _repacked(weight: Weight) -> Weight | None:
    for layout, options in () if weight.format in DEQUANTIZED_FORMATS else LAYOUTS:
        try:
            return repack(weight, layout, **options)
        except (RepackError, CastError):
            continue  # the next layout may hold it
    return None


class EmulatedKernel:
    """A kernel of one format, as an adapter of `kill_matrix`."""

    format: ClassVar[str]

    def pack(self, weight: Weight) -> Tensor:
        """Return the matrix (N, K) that lanes read from a `weight`."""
        return emulated_weight(weight)

    def gemm(self, x: Tensor, buffers: Tensor) -> Tensor:
        """Multiply x (M, K) by `buffers` of `pack`, rounded to the type of x -> y (M, N)."""
        return emulators.multiply(x, buffers.T.to(x.dtype))


class GPTQ(EmulatedKernel):
    """GPTQ, symmetric, asymmetric and in act order."""

    format = "gptq"


class AWQ(EmulatedKernel):
    """AWQ with zero points."""

    format = "awq"


class CTPack(EmulatedKernel):
    """compressed-tensors' packed integers with bfloat16 scales."""

    format = "ct_pack"


class Fp8(EmulatedKernel):
    """FP8 with scales of blocks."""

    format = "fp8"


class NVFP4(EmulatedKernel):
    """NVFP4 with two levels of scales."""

    format = "nvfp4"
