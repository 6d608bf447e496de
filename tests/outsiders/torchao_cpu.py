"""Suites of torchao's quantized tensors on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance import ConformanceCase
from tests.outsiders.tensor_suite import DequantizedSuite, TensorSuite

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
nvfp4_tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")


class TestIntx(TensorSuite):
    """w = (code - zero point) * scale, in groups."""

    format = "gptq"
    subject = "IntxUnpackedToInt8Tensor"
    package = "torchao"

    def pack(self, weight: Any) -> Any:
        codes = weight.codes()
        half = 2 ** (codes.bits - 1)
        plain, zeros = ((part.int() - half).to(torch.int8) for part in (codes.plain(), codes.zeros))
        return plain, codes.scales.to(torch.bfloat16), zeros, codes.bits

    def tensor(self, *buffers: Any) -> Any:
        plain, scales, zeros, bits = buffers
        block, kind = (1, plain.shape[1] // scales.shape[1]), getattr(torch, f"int{bits}")
        return quantization.IntxUnpackedToInt8Tensor(plain, scales, zeros, kind, block, torch.bfloat16, None)

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        return not case.act_order and case.zeros != "wrapping", "groups in order, zero points of 8 bits"


class TestInt8(TensorSuite):
    """w = code * scale, with a scale for each output."""

    format = "ct_int"
    subject = "Int8Tensor"
    package = "torchao"

    def pack(self, weight: Any) -> Any:
        return weight.weight, weight.weight_scale.reshape(-1, 1).to(torch.bfloat16)

    def tensor(self, *buffers: Any) -> Any:
        data, scales = buffers
        return quantization.Int8Tensor(data, scales, [1, data.shape[1]], torch.bfloat16)

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        return (case.bits, case.symmetric, case.variant) == (8, True, "channel"), "8 bits, a scale an output"


class TestFloat8(TensorSuite):
    """E4M3 with a scale for each output, or for the whole tensor."""

    format = "fp8"
    subject = "Float8Tensor"
    package = "torchao"

    def pack(self, weight: Any) -> Any:
        return weight.weight, weight.weight_scale.reshape(-1, 1)

    def tensor(self, *buffers: Any) -> Any:
        data, scale = buffers
        block = [data.shape[0] // scale.shape[0], data.shape[1]]
        return quantization.Float8Tensor(data, scale, block, dtype=torch.bfloat16)

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        return case.variant != "block", "a scale for each output, or for all"


class TestMXFP4(DequantizedSuite):
    """E2M1 with an exponent for each 32 inputs."""

    format = "ct_mxfp4"
    subject = "mx_tensor.to_dtype (fp4)"
    package = "torchao"

    def pack(self, weight: Any) -> Tensor:
        return self.dequantize(weight.weight_packed, weight.weight_scale, torch.float4_e2m1fn_x2)

    def dequantize(self, data: Tensor, scale: Tensor, element: torch.dtype) -> Tensor:
        exponents = scale.view(torch.float8_e8m0fnu)
        made: Tensor = mx_tensor.to_dtype(data, exponents, element, 32, torch.float32)
        return made


class TestMXFP8(TestMXFP4):
    """E4M3 with an exponent for each 32 inputs."""

    format = "mxfp8"
    subject = "mx_tensor.to_dtype (fp8)"

    def pack(self, weight: Any) -> Tensor:
        return self.dequantize(weight.weight, weight.weight_scale, weight.weight.dtype)


class TestNVFP4(DequantizedSuite):
    """E2M1 with a scale of E4M3 for each 16 inputs, and one for all."""

    format = "modelopt_nvfp4"
    subject = "NVFP4Tensor.dequantize"
    package = "torchao"

    def pack(self, weight: Any) -> Tensor:
        parts = (weight.weight, weight.weight_scale, 16, torch.float32, weight.weight_scale_2.reshape(()))
        made: Tensor = nvfp4_tensor.NVFP4Tensor(*parts).dequantize(torch.float32)
        return made
