"""Other people's 4-bit linears on the same layers, where they can be imported.

An adapter prepares a layer and gives a call x (M, K) -> (M, N), and the weight that it then multiplies with;
or a reason why not. What it returns is checked like our own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from qload.formats import GPTQWeight
from qload.kernel_formats import repack
from qload.layouts import gptq

LinearCall = Callable[[Tensor], Tensor]
GROUPS = (32, 64, 128, 256)


class Refused(Exception):
    """A peer does not take a layer, and says why."""


@dataclass(frozen=True)
class Peer:
    """A name, the module that has to be importable, the dtype of x, and how a layer is prepared."""

    name: str
    module: str
    dtype: torch.dtype
    prepare: Callable[[GPTQWeight], tuple[LinearCall, Tensor]]

    @property
    def here(self) -> bool:
        """Whether it can be imported."""
        return find_spec(self.module) is not None


def tinygemm(layer: GPTQWeight) -> tuple[LinearCall, Tensor]:
    """torch's own: bf16, (code - 8) * scale + zero."""
    bits, size = layer.config.bits, layer.config.group_size
    if bits != 4 or size not in GROUPS:
        raise Refused(f"4 bits in groups of {GROUPS}, got {bits} in groups of {size}")
    codes = gptq.rows(4).unpack(layer.qweight).T
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    scales = layer.scales.bfloat16()
    both = torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()
    rounded = (codes - 8).float() * scales.float().T.repeat_interleave(size, 1)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, size, both), rounded.bfloat16()


def vllm_marlin(layer: GPTQWeight) -> tuple[LinearCall, Tensor]:
    """vLLM's Marlin, fp16, symmetric."""
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    made: Any = repack(layer, "marlin")
    (N, K), kind = made.shape, {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}[layer.config.bits]
    locks = torch.zeros(2048, dtype=torch.int32, device="cuda")
    weight, scales = made.qweight, made.scales

    def call(x: Tensor) -> Tensor:
        nothing = [None] * 3
        result: Tensor = ops.marlin_gemm(
            x, None, weight, None, scales, *nothing, locks, kind, x.shape[0], N, K, use_fp32_reduce=True
        )
        return result

    return call, layer.dequantize().half()


def vllm_machete(layer: GPTQWeight) -> tuple[LinearCall, Tensor]:
    """vLLM's Machete, fp16, symmetric."""
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    kind = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}[layer.config.bits]
    half, size = torch.float16, layer.config.group_size
    columns = layer.qweight.t().contiguous().t()
    packed, scales = ops.machete_prepack_B(columns, half, kind, half), layer.scales

    def call(x: Tensor) -> Tensor:
        y: Tensor = ops.machete_mm(x, packed, kind, half, b_group_scales=scales, b_group_size=size)
        return y

    return call, layer.dequantize().half()


def humming(layer: GPTQWeight) -> tuple[LinearCall, Tensor]:
    """Humming, fp16, symmetric, loaded as the GPTQ layer it is."""
    from humming.layer import HummingLayer

    (N, K), config = layer.shape, layer.config
    scheme = {"quant_method": "gptq", "bits": config.bits, "group_size": config.group_size}
    made = HummingLayer(shape_n=N, shape_k=K, weight_config=scheme, torch_dtype=torch.float16).cuda()
    held = {"qweight": layer.qweight, "scales": layer.scales, "g_idx": layer.g_idx}
    for name, tensor in held.items():
        getattr(made, name).data.copy_(tensor)
    made.qzeros.data.fill_(0x77777777 if config.bits == 4 else 0x7F7F7F7F)  # stored minus one
    made.transform()
    return made, layer.dequantize().half()


def gemlite(layer: GPTQWeight) -> tuple[LinearCall, Tensor]:
    """GemLite, fp16, with its own tuning."""
    from gemlite.core import DType, GemLiteLinear

    (N, K), config = layer.shape, layer.config
    made = GemLiteLinear(
        config.bits, config.group_size, K, N, input_dtype=DType.FP16, output_dtype=DType.FP16
    )
    codes = gptq.rows(config.bits).unpack(layer.qweight).T.to(torch.uint8).contiguous()
    scales = layer.scales.T.contiguous()
    made.pack(codes, scales, torch.full_like(scales, 2 ** (config.bits - 1)), None)
    return made, layer.dequantize().half()


def bitsandbytes(layer: GPTQWeight) -> tuple[LinearCall, Tensor]:
    """bitsandbytes' nf4 of a layer of this shape, fp16: its own codes."""
    from bitsandbytes import functional, matmul_4bit

    packed, state = functional.quantize_4bit(layer.dequantize().half(), blocksize=64, quant_type="nf4")
    rounded: Tensor = functional.dequantize_4bit(packed, state)
    return lambda x: matmul_4bit(x, packed.t(), state), rounded


PEERS = (
    Peer("tinygemm", "torch", torch.bfloat16, tinygemm),
    Peer("marlin", "vllm", torch.float16, vllm_marlin),
    Peer("machete", "vllm", torch.float16, vllm_machete),
    Peer("humming", "humming", torch.float16, humming),
    Peer("gemlite", "gemlite", torch.float16, gemlite),
    Peer("bnb nf4", "bitsandbytes", torch.float16, bitsandbytes),
)
