"""bitsandbytes' CPU dequantization of nf4, fp4 and int8, put on trial as kernels that multiply by it."""

from typing import Any

import pytest
from torch import Tensor

from qload.conformance import ConformanceCase, LinearKernelSuite

functional = pytest.importorskip("bitsandbytes.functional")


class TestNF4(LinearKernelSuite):
    """Codes of two a byte, blocks that lie flat over the weight."""

    format = "bnb_nf4"
    subject = "dequantize_4bit (nf4)"
    package = "bitsandbytes"

    def pack(self, weight: Any) -> Any:
        block, kind, shape = weight.config.blocksize, weight.config.quant_type, weight.shape
        return weight.weight, weight.absmax.float(), (block, kind, tuple(shape))

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        words, absmax, (block, kind, shape) = buffers
        state = functional.QuantState(absmax, shape=shape, blocksize=block, quant_type=kind, dtype=x.dtype)
        state.code = functional.get_4bit_type(kind, device="cpu", blocksize=block)
        w = functional.dequantize_4bit(words, state)
        return (x.float() @ w.float().T).to(x.dtype)

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        return case.variant == "single", "scales that are quantized too are dequantized by the caller"


class TestFP4(TestNF4):
    """The same of the other table."""

    format = "bnb_fp4"
    subject = "dequantize_4bit (fp4)"


class TestInt8(LinearKernelSuite):
    """w = code * SCB / 127."""

    format = "bnb_int8"
    subject = "int8_vectorwise_dequant"
    package = "bitsandbytes"

    def pack(self, weight: Any) -> Any:
        return weight.weight, weight.SCB

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        w = functional.int8_vectorwise_dequant(*buffers).to(x.dtype)
        return (x.float() @ w.float().T).to(x.dtype)
