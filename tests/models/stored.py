"""Matrices of a plain model in other formats, by the layouts and quantizers that the library has."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qload import Fp8Quantizer
from qload.layouts import STORED_MINUS_ONE, awq, compressed_tensors, gptq
from qload.quantize import BNB4Quantizer
from qload.spec import Layer, named

GROUP = 32
BLOCK = 16
Packer = Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Stored:
    """A format: the `quantization_config` of a checkpoint, and a matrix (N, K) as its tensors by suffix."""

    config: Mapping[str, Any]
    pack: Packer
    declares: bool = False  # whether inputs are quantized too


def rounded(matrix: Tensor, groups: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of 4 bits (N, K), scales (N, G) that fp16 holds, and zero points (N, G); groups of inputs."""
    count = int(groups.max()) + 1
    spread = [matrix[:, groups == g] for g in range(count)]
    least = torch.stack([each.amin(1).clamp(max=0) for each in spread], 1)
    most = torch.stack([each.amax(1).clamp(min=0) for each in spread], 1)
    if symmetric:
        scales = (2 * torch.maximum(most, -least) / 15).half().float()
        zeros = torch.full_like(scales, 8)
    else:
        scales = ((most - least) / 15).half().float()
        zeros = (-least / scales).round().clamp(1, 15)
    codes = (matrix / scales[:, groups] + zeros[:, groups]).round().clamp(0, 15)
    return codes.int(), scales.half(), zeros.int()


def gptq_act_order(matrix: Tensor) -> dict[str, Tensor]:
    K = matrix.shape[1]
    order = torch.randperm(K, generator=torch.Generator().manual_seed(K))  # one for all of the same inputs
    groups = (torch.arange(K) // GROUP)[order]
    codes, scales, zeros = rounded(matrix, groups, symmetric=False)
    return {
        "qweight": gptq.rows(4).pack(codes.T.contiguous()),
        "qzeros": STORED_MINUS_ONE.write(zeros.T.contiguous(), gptq.columns(4)),
        "scales": scales.T.contiguous(),
        "g_idx": groups.int(),
    }


def awq_gemm(matrix: Tensor) -> dict[str, Tensor]:
    codes, scales, zeros = rounded(matrix, torch.arange(matrix.shape[1]) // GROUP, symmetric=False)
    pack = awq.columns(4).pack
    return {
        "qweight": pack(codes.T.contiguous()),
        "qzeros": pack(zeros.T.contiguous()),
        "scales": scales.T.contiguous(),
    }


def ct_w4a16(matrix: Tensor) -> dict[str, Tensor]:
    codes, scales, _ = rounded(matrix, torch.arange(matrix.shape[1]) // GROUP, symmetric=True)
    return {
        "weight_packed": compressed_tensors.pack(codes, 4, dense=True),
        "weight_scale": scales,
        "weight_shape": torch.tensor(matrix.shape),
    }


def ct_w8a8(matrix: Tensor) -> dict[str, Tensor]:
    scales = matrix.abs().amax(1, keepdim=True) / 127
    return {"weight": (matrix / scales).round().to(torch.int8), "weight_scale": scales}


def fp8_block(matrix: Tensor) -> dict[str, Tensor]:
    N, K = matrix.shape
    made = Fp8Quantizer("block", (BLOCK, BLOCK)).quantize(matrix, Layer((N,), K, (N, K)), torch.float32)
    return {"weight": made.weight, "weight_scale_inv": made.weight_scale}


def bnb_nf4(matrix: Tensor) -> dict[str, Tensor]:
    N, K = matrix.shape
    made = BNB4Quantizer("nf4", GROUP).quantize(matrix, Layer((N,), K, (N, K)), torch.float32)
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float32", "shape": [N, K]}
    return {
        "weight": made.weight,
        "weight.absmax": made.absmax,
        "weight.quant_map": made.quant_map.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode())).byte(),
    }


def ct_config(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "version": "0.18.0",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
A8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FORMATS: Mapping[str, Stored] = {
    "GPTQ, act order": Stored(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
        gptq_act_order,
    ),
    "AWQ": Stored(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        awq_gemm,
    ),
    "FP8, blocks": Stored(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        fp8_block,
        declares=True,
    ),
    "bitsandbytes nf4": Stored(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bnb_nf4
    ),
    "compressed-tensors W4A16": Stored(ct_config("pack-quantized", W4, None), ct_w4a16),
    "compressed-tensors W8A8": Stored(ct_config("int-quantized", W8, A8), ct_w8a8, declares=True),
}


def quantized(tensors: Mapping[str, Tensor], form: Stored) -> dict[str, Tensor]:
    """The tensors of a model: all matrices of its layers but the routers' in a format."""
    made = {}
    for name, tensor in tensors.items():
        prefix = name.removesuffix(".weight")
        if prefix == name or tensor.ndim != 2 or ".layers." not in name or is_router(prefix):
            made[name] = tensor
        else:
            packed = form.pack(tensor.float())
            made |= {named(prefix, suffix): each for suffix, each in packed.items()}
    return made


def is_router(prefix: str) -> bool:
    """Whether a matrix chooses experts, which stays plain."""
    return prefix.endswith((".gate", ".router"))
