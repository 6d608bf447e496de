"""Layers of random codes and scales by (N, K), in the formats that tools write."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from qload.layouts.bnb import TABLES

GROUP = 16
Fields = Mapping[str, Tensor]


@dataclass(frozen=True)
class Format:
    """A format: the section of the config, and what makes a layer (N, K) of it.

    `experts`: whether a tool writes it for experts that a model keeps in one tensor, one by one; else they
    stay plain there: the owners' programs quantize linear layers alone. `declares`: whether inputs are
    quantized too. `inner`: what lies between in a layer. `worlds`: that can share a model so, `refused`: one
    that cannot, as a cut falls inside of what shares a word or a scale; None: there is none.
    """

    section: Mapping[str, Any]
    layer: Callable[[int, int, Generator], Fields]
    experts: bool = False
    declares: bool = False
    inner: int = 192
    worlds: tuple[int, ...] = (1, 2, 4)
    refused: int | None = 8


def words(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Any int32."""
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)


def scales(shape: tuple[int, ...], K: int, steps: float, generator: Generator, dtype: torch.dtype) -> Tensor:
    """Positive, such that rows of K codes that are `steps` off zero keep the size of an input."""
    return ((torch.rand(shape, generator=generator) + 0.5) * K**-0.5 / steps).to(dtype)


def gptq(N: int, K: int, generator: Generator) -> Fields:
    order = torch.randperm(K, generator=generator)
    return {
        "qweight": words((K // 8, N), generator),
        "qzeros": words((K // GROUP, N // 8), generator),
        "scales": scales((K // GROUP, N), K, 5, generator, torch.float16),
        "g_idx": (torch.arange(K) // GROUP)[order].to(torch.int32),
    }


def awq(N: int, K: int, generator: Generator) -> Fields:
    return {
        "qweight": words((K, N // 8), generator),
        "qzeros": words((K // GROUP, N // 8), generator),
        "scales": scales((K // GROUP, N), K, 5, generator, torch.float16),
    }


def fp8_block(N: int, K: int, generator: Generator) -> Fields:
    blocks = (-(-N // GROUP), -(-K // GROUP))
    return {
        "weight": torch.randn(N, K, generator=generator).mul(50).to(torch.float8_e4m3fn),
        "weight_scale_inv": scales(blocks, K, 50, generator, torch.float32),
    }


def nf4(N: int, K: int, generator: Generator) -> Fields:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [N, K]}
    codes = torch.randint(0, 256, (N * K // 2, 1), generator=generator)
    return {
        "weight": codes.to(torch.uint8),
        "weight.absmax": scales((N * K // 64,), K, 0.6, generator, torch.float32),
        "weight.quant_map": torch.tensor(TABLES["nf4"]),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def w4a16(N: int, K: int, generator: Generator) -> Fields:
    return {
        "weight_packed": words((N, K // 8), generator),
        "weight_scale": scales((N, K // GROUP), K, 5, generator, torch.bfloat16),
        "weight_shape": torch.tensor([N, K]),
    }


def w8a8(N: int, K: int, generator: Generator) -> Fields:
    return {
        "weight": torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int64).to(torch.int8),
        "weight_scale": scales((N, 1), K, 73, generator, torch.float32),
    }


def compressed(
    name: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A section as llm-compressor writes it; plain tensors are what it left out."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    sections = {"group_0": group}
    ignore = ["lm_head", r"re:.*(gate|router)$", r"re:.*experts$"]
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": sections, "ignore": ignore}


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
FORMATS: Mapping[str, Format] = {
    "gptq": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
        gptq,
        inner=160,
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq
    ),
    "fp8 block": Format(
        {
            "quant_method": "fp8",
            "weight_block_size": [GROUP, GROUP],
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
        },
        fp8_block,
        declares=True,
    ),
    "nf4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        nf4,
        inner=256,
        worlds=(1, 2),
        refused=4,
    ),
    "w4a16": Format(
        compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        ),
        w4a16,
        experts=True,
    ),
    "w8a8": Format(
        compressed(
            "int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}, INT8
        ),
        w8a8,
        experts=True,
        declares=True,
        refused=None,
    ),
}
