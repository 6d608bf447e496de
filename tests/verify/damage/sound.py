"""Sound models of two layers in each format: normal weights, quantized by their largest magnitudes."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qload.layouts import gptq
from qload.layouts.bnb import TABLES
from tests.verify.damage.model import Model

HIDDEN, INNER, VOCABULARY = 256, 512, 320
LEAST = 1e-7  # of a largest magnitude, as quantizers have it for weights that are all zero
SHAPES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, INNER),
}
Quantize = Callable[[Tensor], dict[str, Tensor]]
Make = Callable[[Quantize, dict[str, Any] | None], Model]


def modelled(quantize: Quantize, quantization: dict[str, Any] | None) -> Model:
    """Two layers of normal weights, quantized so, and said to be so."""
    draw = torch.Generator().manual_seed(0)

    def weights(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * 0.05

    tensors = {
        "model.embed_tokens.weight": weights(VOCABULARY, HIDDEN).bfloat16(),
        "lm_head.weight": weights(VOCABULARY, HIDDEN).bfloat16(),
        "model.norm.weight": 1 + weights(HIDDEN).bfloat16(),
    }
    for layer in range(2):
        lead = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{lead}.{norm}.weight"] = 1 + weights(HIDDEN).bfloat16()
        for name, shape in SHAPES.items():
            made = quantize(weights(*shape))
            tensors |= {f"{lead}.{name}.{field}": tensor for field, tensor in made.items()}
    config: dict[str, Any] = {"num_hidden_layers": 2}
    return Model(tensors, config if quantization is None else {**config, "quantization_config": quantization})


def plain(make: Make = modelled) -> Model:
    """Not quantized."""
    return make(lambda weight: {"weight": weight.bfloat16()}, None)


def fp8(make: Make = modelled) -> Model:
    """Blocks of FP8."""
    size = 128

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        N, K = weight.shape
        blocks = weight.reshape(N // size, size, K // size, size)
        scales = blocks.abs().amax((1, 3)).clamp(min=LEAST) / 448
        codes = (blocks / scales[:, None, :, None]).reshape(N, K).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scales}

    said = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [size, size],
    }
    return make(quantize, said)


def packed(make: Make = modelled) -> Model:
    """Four bits in words, as compressed-tensors writes them."""
    size = 128

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        N, K = weight.shape
        groups = weight.reshape(N, -1, size)
        scales = (groups.abs().amax(2).clamp(min=LEAST) / 7.5).bfloat16()
        codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).reshape(N, K).int() + 8
        words = gptq.rows(4).pack(codes.T.contiguous()).T.contiguous()
        return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([N, K])}

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}
    group = {"targets": ["Linear"], "weights": weights}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"]}  # fmt: skip
    return make(quantize, said)


def nf4(make: Make = modelled) -> Model:
    """Normal floats, as bitsandbytes writes them."""
    table, size = torch.tensor(TABLES["nf4"]), 64

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        blocks = weight.reshape(-1, size)
        scales = blocks.abs().amax(1)
        codes = (
            torch.bucketize(blocks / scales.clamp(min=LEAST)[:, None], (table[1:] + table[:-1]) / 2)
            .flatten()
            .to(torch.uint8)
        )
        state = json.dumps(
            {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": [*weight.shape]}
        )
        return {
            "weight": ((codes[::2] << 4) | codes[1::2])[:, None],
            "weight.absmax": scales,
            "weight.quant_map": table,
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
        }

    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False, "llm_int8_skip_modules": ["lm_head"]}  # fmt: skip
    return make(quantize, said)


MODELS = {"plain": plain, "fp8": fp8, "packed": packed, "nf4": nf4}
