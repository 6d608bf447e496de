"""torch's own CPU products of packed int4 and int8, put on trial through the public suite."""

from typing import Any

import torch
from torch import Tensor

from qload.conformance import ConformanceCase, LinearKernelSuite


class TestTorchInt4(LinearKernelSuite):
    """w = (code - 8) * scale + zero, in groups of 32 to 256 inputs in order; the zero is in x's type."""

    format = "gptq"
    subject = "_weight_int4pack_mm_for_cpu"
    package = "torch"
    dtypes = ("bfloat16", "float16")

    def pack(self, weight: Any) -> Any:
        codes = weight.codes()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.plain().int().contiguous(), 1)
        zeros = (8 - codes.zeros) * codes.scales
        return packed, torch.stack([codes.scales, zeros], -1).transpose(0, 1).contiguous()

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        packed, pairs = buffers
        group = x.shape[1] // pairs.shape[0]
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, pairs.to(x.dtype))
        return y

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        if (case.bits, case.act_order) != (4, False) or case.group_size not in (32, 64, 128, 256):
            return False, "4 bits, groups of 32 to 256, in order"
        return case.zeros != "wrapping", "zero points that wrap are no matter of a kernel that takes numbers"


class TestTorchInt8(LinearKernelSuite):
    """w = code * scale, one scale an output."""

    format = "ct_int"
    subject = "_weight_int8pack_mm"
    package = "torch"
    dtypes = ("bfloat16",)
    scales = "bfloat16"

    def pack(self, weight: Any) -> Any:
        return weight.weight.contiguous(), weight.weight_scale.reshape(-1)

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        codes, scales = buffers
        y: Tensor = torch.ops.aten._weight_int8pack_mm(x, codes, scales.to(x.dtype))
        return y

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        return (case.bits, case.symmetric, case.variant) == (8, True, "channel"), "8 bits, a scale an output"
