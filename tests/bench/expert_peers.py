"""vLLM's experts by Marlin on the same weights, where it can be imported: 4 bits, FP8, MXFP4 and NVFP4."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from qload.experts import ExpertsWeight, GatedActivation
from qload.kernel_formats import repack
from qload.kernels.cuda import decoder_ops
from qload.kernels.scalar_type import ScalarType, scalar_types
from tests.gpu.expert_layers import Experts, Tokens

BLOCKS = (8, 16, 32, 48, 64)  # rows of a block
FILLED = 0.9  # of a block, by an expert's rows on average, from which the next larger is taken


SILU = GatedActivation("silu")
DRAWS = 12  # experts of a format from which their tensors repeat: 4 draws of 3 matrices


FIELDS = ("qweight", "scales")


class Target(NamedTuple):
    """Layout and options of `repack` for vLLM's kernel, and the kernel's type of codes."""

    layout: str
    options: Mapping[str, Any]
    code: ScalarType


FP4 = Target("marlin_vllm_0_33", {"dtype": torch.bfloat16}, scalar_types.float4_e2m1f)
TARGETS = {
    "gptq": Target("marlin", {}, scalar_types.uint4b8),
    "fp8": Target("marlin", {"dtype": torch.bfloat16, "exponent_bias": True}, scalar_types.float8_e4m3fn),
    "mxfp4": FP4,
    "nvfp4": FP4,
}


class MarlinMatrix(NamedTuple):
    """A matrix of each expert in Marlin's order, stacked; second scales of NVFP4."""

    weights: Tensor
    scales: Tensor
    second_scales: Tensor | None = None


def here() -> bool:
    """Return whether vLLM can be imported, or its library of experts is loaded."""
    if find_spec("vllm") is not None:
        import_module("vllm._custom_ops")
    return hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm")


class MarlinExperts:
    """A layer as vLLM holds it: Marlin's order, stacked; a call does what its `fused_marlin_moe` does."""

    @classmethod
    def of_strips(cls, held: Experts) -> Self:
        """Experts of 4 bits in strips, symmetric, fp16."""
        both = [_stacked(held, name) for name in ("gate_up", "down")]
        return cls(both, held.down.K, scalar_types.uint4b8)

    @classmethod
    def of_stored(cls, stored: ExpertsWeight, target: Target) -> Self:
        """Experts in bf16 from `stored` ones, the first few of which repeat."""
        both = []
        for stack in (stored.gate_up, stored.down):
            drawn: list[Any] = [
                repack(stack.expert(e), target.layout, **target.options)
                for e in range(min(DRAWS, len(stack)))
            ]
            every = [drawn[e % DRAWS] for e in range(len(stack))]
            weights, scales = (torch.stack([getattr(each, name) for each in every]) for name in FIELDS)
            second = [getattr(each, "global_scale", None) for each in every]
            found = None if second[0] is None else torch.stack([each.float().reshape(()) for each in second])
            scales = scales.bfloat16() if scales.dtype == torch.float16 else scales
            both.append(MarlinMatrix(weights, scales, found))
        return cls(both, stored.down.layer.K, target.code)

    def __init__(self, both: list[MarlinMatrix], inner: int, code: ScalarType) -> None:
        self.experts, self.inner, self.both, self.code = len(both[1].weights), inner, both, code
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

        def product(x: Tensor, y: Tensor, matrix: MarlinMatrix, shared: int, weighted: bool) -> None:
            weight, scales, second = matrix
            ops.moe_wna16_marlin_gemm(
                x, y, weight, None, scales, None, second, None, self.locks, order, of_block, count,
                chosen.weights, block, shared, weighted, self.code.id, x.shape[0], y.shape[1],
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


def _stacked(held: Experts, name: str) -> MarlinMatrix:
    """Codes and scales of all experts of a matrix in Marlin's order."""
    made: list[Any] = [repack(held.weight(name, e), "marlin") for e in range(held.down.experts)]
    return MarlinMatrix(*(torch.stack([getattr(each, name) for each in made]) for name in FIELDS))
