"""A suite of tensors that multiply by `torch.nn.functional.linear`, built from plain buffers at each call."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from qload.conformance import LinearKernelSuite


class TensorSuite(LinearKernelSuite):
    """A product with a subclass of Tensor, whose scales have the type of x."""

    dtypes = ("bfloat16",)
    scales = "bfloat16"

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        y: Tensor = torch.nn.functional.linear(x, self.tensor(*buffers))
        return y

    @abstractmethod
    def tensor(self, *buffers: Any) -> Any:
        """Return the tensor with these parts."""


class DequantizedSuite(LinearKernelSuite):
    """A dequantization: `pack` returns the weight, rounded to the type of x for a product in float32."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        return (x.float() @ buffers.to(x.dtype).float().T).to(x.dtype)
