"""Suites of MLX's products and of its dequantization on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance import LinearKernelSuite

mx = pytest.importorskip("mlx.core", exc_type=ImportError)


def array(tensor: Tensor) -> Any:
    """Convert to an array of MLX with the same bits."""
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.uint16).numpy()).view(mx.bfloat16)
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        return mx.array(tensor.view(torch.uint8).numpy())
    return mx.array(tensor.contiguous().numpy())


def tensor(values: Any) -> Tensor:
    """Convert to a tensor with the same bits."""
    mx.eval(values)
    if values.dtype == mx.bfloat16:
        return torch.from_dlpack(values.view(mx.uint16)).view(torch.bfloat16).clone()
    return torch.from_dlpack(values).clone()


class TestQuantizedMatmul(LinearKernelSuite):
    """w = scale * code + bias, in groups."""

    format = "mlx"
    subject = "quantized_matmul (affine)"
    package = "mlx"
    accumulate = "float16"
    scales = "float16"

    def pack(self, weight: Any) -> Any:
        arrays = [array(part) for part in (weight.weight, weight.scales.half(), weight.biases.half())]
        return arrays, {"group_size": weight.config.group_size, "bits": weight.config.bits}

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        arrays, options = buffers
        y = mx.quantized_matmul(array(x), *arrays, transpose=True, stream=mx.cpu, **options)
        return tensor(y)


class TestDequantize(TestQuantizedMatmul):
    """The same, dequantized in the type of the scales."""

    subject = "dequantize (affine)"
    accumulate = "float32"

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        arrays, options = buffers
        w = tensor(mx.dequantize(*arrays, stream=mx.cpu, **options))
        return (x.float() @ w.to(x.dtype).float().T).to(x.dtype)


class TestFloats(TestQuantizedMatmul):
    """E2M1 with a scale of one byte for each group."""

    format = "mlx_float"
    subject = "quantized_matmul (mxfp4, nvfp4)"

    def pack(self, weight: Any) -> Any:
        arrays = [array(weight.weight), array(weight.scales)]
        bits, group = {"mxfp4": (4, 32), "nvfp4": (4, 16)}[weight.config.mode]
        return arrays, {"group_size": group, "bits": bits, "mode": weight.config.mode}
