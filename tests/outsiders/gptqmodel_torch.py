"""Suites of GPTQModel's linears of plain torch on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance import ConformanceCase, LinearKernelSuite

torch_linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", exc_type=ImportError)
torch_awq = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch_awq", exc_type=ImportError)


class TestTorchLinear(LinearKernelSuite):
    """GPTQ of 2, 3, 4 and 8 bits, with act order."""

    format = "gptq"
    subject = "TorchLinear"
    package = "gptqmodel"

    def pack(self, weight: Any) -> Any:
        return self.fill(torch_linear.TorchLinear, weight, bits=weight.config.bits, desc_act=True)

    def fill(self, kind: Any, weight: Any, **options: Any) -> Any:
        N, K = weight.shape
        module = kind(
            group_size=weight.config.group_size, sym=False, in_features=K, out_features=N, **options
        )
        module.bias = None
        for name, tensor in weight.fields().items():
            setattr(module, name, tensor.clone())
        module.post_init()
        return module.eval()

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        with torch.no_grad():
            y: Tensor = buffers(x)
        return y

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        return case.zeros == "v2", "zero points of v2, as its loader makes them"


class TestAWQTorchLinear(TestTorchLinear):
    """AWQ of 4 bits."""

    format = "awq"
    subject = "AwqTorchLinear"

    def pack(self, weight: Any) -> Any:
        return self.fill(torch_awq.AwqTorchLinear, weight, bits=weight.config.bits, desc_act=False)

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        return case.bits == 4 and not case.symmetric, "4 bits with zero points"
