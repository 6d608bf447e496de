"""Base of the linear operators: arguments of a call, weights without kernels, the choice of a kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload.devices.cuda import runs_on
from qload.kernels.cuda import launch
from qload.kernels.cuda.choice import CudaKernel, choose
from qload.kernels.cuda.module import native

ACTIVATIONS = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)


@dataclass(frozen=True)
class LinearCall:
    """x (M, K) and the words of a weight; operators add the rest, `bits` and `N` among it."""

    x: Tensor
    weights: Tensor

    layout: ClassVar[str]

    @property
    def kind(self) -> str:
        """Kind of the layer in the table of kernels."""
        return ""

    @property
    def tokens(self) -> int:
        """M."""
        return self.x.shape[0]

    @property
    def bytes(self) -> int:
        """Bytes of the codes."""
        return 4 * self.weights.numel()

    def why_not_hopper(self) -> str | None:
        """Reason why x's device cannot run kernels with Hopper's own instructions, or None."""
        return launch.why_not_hopper(self.x.device)


def why_not(weight: Any, dtype: torch.dtype) -> str | None:
    """Why activations of a dtype cannot be multiplied with a weight as it lies, or None."""
    device = weight.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"needs a CUDA device of capability 8.0, the weight is on {device}"
    if not runs_on(native(), device):
        return f"the CUDA module was built for {native().chips}, and not for the chip of {device}"
    return why_not_on(weight, dtype, torch.cuda.get_device_capability(device))


def why_not_on(weight: Any, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Reason why a chip of a capability cannot multiply a weight, wherever that is, or None."""
    if capability < CAPABILITY:
        return f"needs a CUDA device of capability 8.0, got {capability[0]}.{capability[1]}"
    if dtype not in ACTIVATIONS or weight.scales.dtype != dtype:
        return f"needs float16 or bfloat16 of both, got {dtype} activations, {weight.scales.dtype} scales"
    return None


def multiply(kernels: Sequence[CudaKernel], call: Any, kernel: str) -> Tensor:
    """y (M, N) of a checked call, by the named kernel or the fastest for the call."""
    if not call.tokens or not call.N:
        return call.x.new_empty(call.tokens, call.N)  # type: ignore[no-any-return]
    capability = torch.cuda.get_device_capability(call.x.device)
    return choose(kernels, call, layout=call.layout, capability=capability, asked=kernel).run(call)
