"""Marlin's kernel: 4 and 8 bits, with or without zero points, act order too, any shape by padding."""

import torch
from torch import nn

from qload.formats import GPTQWeight
from qload.kernel_formats import marlin
from qload.kernel_formats.marlin import GROUP_SIZES, count_locks, split_group
from qload.kernels.chips import multiprocessors
from qload.kernels.mp_linear.contract import MPLinearLayerConfig
from qload.kernels.mp_linear.owners import free_name
from qload.kernels.mp_linear.typed import TypedLinearKernel
from qload.spec import Weight


class MarlinLinearKernel(TypedLinearKernel):
    """Multiplies weights in Marlin's order; groups of a multiple of 32 rows are several that it reads."""

    name = "marlin"
    bits = (4, 8)
    act_types = (torch.float16, torch.bfloat16)

    @classmethod
    def get_min_capability(cls) -> int:
        """That of Ampere, 8.0."""
        return 80

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """As every kernel; zero points only that a code can be."""
        able, reason = super().can_implement(c)
        if able and c.groups > 1 and split_group(c.group_size) is None:
            sizes = ", ".join(str(size) for size in GROUP_SIZES if size > 0)
            return False, f"reads groups of {sizes}, multiples of them, or one group, got {c.group_size}"
        bits = c.weight_type.size_bits if able else 0
        highest = c.zeros.span(bits)[1] if able and c.zero_points and c.zeros else 0
        if able and highest >= 2**bits:
            return False, f"a zero point of {highest}, which `zeros` can say, does not fit {bits} bits"
        return able, reason

    def repacked(self, weight: GPTQWeight) -> Weight:
        """In Marlin's order, padded to its thread blocks; refuses what cannot be rounded for many tokens."""
        self.check_range(weight)
        return marlin.from_integers(weight.to_integers(), self.config.zero_points)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """As every kernel, and a zeroed workspace of locks."""
        super().process_weights_after_loading(layer)
        device, N = getattr(layer, self.w_q_name).device, self.config.partition_weight_shape[1]
        count = count_locks(N, multiprocessors(device))
        name = free_name(layer, self.w_q_name, "workspace")
        layer.register_buffer(name, torch.zeros(count, dtype=torch.int32, device=device), False)
