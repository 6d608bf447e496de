"""Suites of optimum-quanto's quantized weights on a CPU."""

from typing import Any

import pytest
import torch

from qload.conformance import ConformanceCase
from tests.outsiders.tensor_suite import TensorSuite

quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
packed = pytest.importorskip("optimum.quanto.tensor.packed")
weights = pytest.importorskip("optimum.quanto.tensor.weights")


class TestQBits(TensorSuite):
    """w = (code - shift) * scale, with integer shifts, in groups."""

    format = "gptq"
    subject = "WeightQBitsTensor"
    package = "optimum-quanto"

    def pack(self, weight: Any) -> Any:
        codes, (N, K) = weight.codes(), weight.shape
        scales, shifts = codes.scales.to(torch.bfloat16), codes.zeros.to(torch.int8)
        grouped = codes.plain().to(torch.uint8).reshape(scales.numel(), -1)
        return grouped, scales.reshape(-1, 1), shifts.reshape(-1, 1), (N, K), codes.bits

    def tensor(self, *buffers: Any) -> Any:
        grouped, scales, shifts, (N, K), bits = buffers
        kind, data = {2: quanto.qint2, 4: quanto.qint4}[bits], packed.PackedTensor.pack(grouped, bits)
        size, group = torch.Size((N, K)), grouped.shape[1]
        return weights.WeightQBitsTensor(kind, 0, group, size, (K, 1), data, scales, shifts)

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        if case.bits not in (2, 4) or case.group_size == -1:
            return False, "2 and 4 bits in groups"
        return not case.act_order and case.zeros != "wrapping", "groups in order, shifts of 8 bits"


class TestInt8(TensorSuite):
    """w = code * scale, with a scale for each output."""

    format = "ct_int"
    subject = "WeightQBytesTensor (qint8)"
    package = "optimum-quanto"

    def pack(self, weight: Any) -> Any:
        return weight.weight, weight.weight_scale.reshape(-1, 1).to(torch.bfloat16)

    def tensor(self, *buffers: Any) -> Any:
        data, scale = buffers
        kind = quanto.qint8 if data.dtype == torch.int8 else quanto.qfloat8_e4m3fn
        return weights.WeightQBytesTensor(kind, 0, data.size(), data.stride(), data, scale, None)

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        return (case.bits, case.symmetric, case.variant) == (8, True, "channel"), "8 bits, a scale an output"


class TestFloat8(TestInt8):
    """E4M3 with a scale for each output."""

    format = "fp8"
    subject = "WeightQBytesTensor (qfloat8_e4m3fn)"
