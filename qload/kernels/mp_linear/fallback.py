"""The kernel that always works: say what the weight means, then multiply."""

import torch

from qload.kernels.mp_linear.typed import TypedLinearKernel


class DequantizeLinearKernel(TypedLinearKernel):
    """Every width, group size, order and float dtype, on every device; slow."""

    name = "dequantize"
    bits = (2, 3, 4, 8)
    act_types = (torch.float16, torch.bfloat16, torch.float32)

    @classmethod
    def get_min_capability(cls) -> int:
        """None is needed."""
        return 0
