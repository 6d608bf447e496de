"""transformers' dequantization of MXFP4, put on trial as a kernel that multiplies by it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance import LinearKernelSuite

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


class TestConvertMoePackedTensors(LinearKernelSuite):
    """Blocks of 32 codes, (E, N, K / 32, 16) bytes, give (E, K, N) in bfloat16."""

    format = "ct_mxfp4"
    subject = "convert_moe_packed_tensors"
    package = "transformers"
    dtypes = ("bfloat16",)

    def pack(self, weight: Any) -> Any:
        N, K = weight.shape
        return weight.weight_packed.reshape(1, N, K // 32, 16), weight.weight_scale.reshape(1, N, K // 32)

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        (w,) = mxfp4.convert_moe_packed_tensors(*buffers, dtype=torch.bfloat16)
        return (x.float() @ w.float()).to(x.dtype)
