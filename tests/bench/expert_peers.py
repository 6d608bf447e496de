"""vLLM's experts by Marlin on the same weights, where it can be imported: 4 bits, symmetric, fp16."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from qload.experts import GatedActivation
from qload.kernel_formats import repack
from qload.kernels.cuda import decoder_ops
from qload.kernels.scalar_type import scalar_types
from tests.gpu.expert_layers import Experts, Tokens

BLOCKS = (8, 16, 32, 48, 64)  # rows of a block
FILLED = 0.9  # of a block, by an expert's rows on average, from which the next larger is taken


SILU = GatedActivation("silu")


def here() -> bool:
    """Return whether vLLM can be imported, or its library of experts is loaded."""
    if find_spec("vllm") is not None:
        import_module("vllm._custom_ops")
    return hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm")


class MarlinExperts:
    """A layer as vLLM holds it: Marlin's order, stacked; a call does what its `fused_marlin_moe` does."""

    def __init__(self, held: Experts) -> None:
        self.experts, self.inner = held.down.experts, held.down.K
        self.both = [_stacked(held, name) for name in ("gate_up", "down")]
        multiprocessors = torch.cuda.get_device_properties().multi_processor_count
        self.locks = torch.zeros(4 * multiprocessors, dtype=torch.int32, device="cuda")

    def __call__(self, chosen: Tokens) -> Tensor:
        """y (M, hidden); ids are int32, weights float32."""
        ops = torch.ops._moe_C
        (M, hidden), top = chosen.x.shape, chosen.ids.shape[1]
        pairs = M * top
        block = next((each for each in BLOCKS if pairs < FILLED * each * self.experts), BLOCKS[-1])
        rows = pairs + self.experts * (block - 1) if pairs >= self.experts else pairs * block
        order, of_block, count = (
            chosen.ids.new_empty(size, dtype=torch.int32) for size in (rows, -(-rows // block), 1)
        )
        ops.moe_align_block_size(chosen.ids, self.experts, block, order, of_block, count, None, None)
        room = chosen.x.new_empty(pairs * max(2 * self.inner, hidden))
        gate_up = room[: 2 * pairs * self.inner].view(pairs, -1)
        down, between = room[: pairs * hidden].view(pairs, -1), chosen.x.new_empty(pairs, self.inner)

        def product(x: Tensor, y: Tensor, matrix: tuple[Tensor, Tensor], shared: int, weighted: bool) -> None:
            weight, scales = matrix
            ops.moe_wna16_marlin_gemm(
                x, y, weight, None, scales, None, None, None, self.locks, order, of_block, count,
                chosen.weights, block, shared, weighted, scalar_types.uint4b8.id, x.shape[0], y.shape[1],
                x.shape[1], False, True, False, -1, -1, -1,
            )  # fmt: skip

        product(chosen.x, gate_up, self.both[0], top, False)
        if hasattr(torch.ops._C, "silu_and_mul"):
            torch.ops._C.silu_and_mul(between, gate_up)
        else:  # the library of experts has no activations
            gated = decoder_ops.gated(gate_up, SILU)
            assert gated is not None
            between = gated
        product(between, down, self.both[1], 1, True)
        y = torch.empty_like(chosen.x)
        ops.moe_sum(down.view(M, top, hidden), y)
        return y


def _stacked(held: Experts, name: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of all experts of a matrix in Marlin's order."""
    made: list[Any] = [repack(held.weight(name, e), "marlin") for e in range(held.down.experts)]
    return torch.stack([each.qweight for each in made]), torch.stack([each.scales for each in made])
