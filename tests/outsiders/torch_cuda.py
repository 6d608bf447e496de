"""torch's own CUDA product of packed int4 (tinygemm), put on trial through the public suite.

pytest -p qload.conformance.plugin tests/outsiders/torch_cuda.py --qload-device cuda
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance import ConformanceCase
from tests.outsiders import torch_cpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

INNER_TILES = 8  # of 16 inputs, that a thread's words hold side by side


class TestTinygemm(torch_cpu.TestTorchInt4):
    """w = (code - 8) * scale + zero, in groups of 32 to 256 inputs in order; both are bfloat16, as x is."""

    subject = "_weight_int4pack_mm"
    dtypes = ("bfloat16",)
    scales = "bfloat16"

    def pack(self, weight: Any) -> Any:
        codes = weight.codes()
        plain = codes.plain().to(torch.uint8)
        pairs = (plain[:, ::2] << 4 | plain[:, 1::2]).contiguous()  # the first of two in the upper half
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, INNER_TILES)
        zeros = (8 - codes.zeros) * codes.scales
        return packed, torch.stack([codes.scales, zeros], -1).transpose(0, 1).contiguous()

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        packed, pairs = buffers
        group = x.shape[1] // pairs.shape[0]
        y: Tensor = torch.ops.aten._weight_int4pack_mm(x, packed, group, pairs.to(x.dtype))
        return y

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        if case.K % (16 * INNER_TILES) or case.N % 8:
            return False, f"multiples of {16 * INNER_TILES} inputs and of 8 outputs"
        return super().can_implement(case)
