"""Latent attention by its formula, in float64: no cache, heads one by one, rotations as complex numbers."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from qload.models.config import TextConfig, text_config

PREFIX = "model.layers.0.self_attn"
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16,
    "beta_slow": 2,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
}
SMALL = {
    "model_type": "deepseek_v3",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "rope_theta": 100.0,
    "rope_scaling": YARN,
    "max_position_embeddings": 512,
}


def drawn(config: Mapping[str, object], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of a whole model, by the names and sizes of its architecture."""
    draw = torch.Generator().manual_seed(seed)
    model, tensors = text_config(config), {}
    for name in (each for each in model.architecture.required() if not each.endswith("proj.bias")):
        expected = model.architecture.expected(name)
        if expected is not None:
            tensors[f"{name}.weight"] = torch.randn(expected, generator=draw) / math.sqrt(expected[1])
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = torch.rand(8, generator=draw)
        else:
            sizes = {"q_a_layernorm": "q_lora", "kv_a_layernorm": "kv_lora"}
            size = model.architecture.sizes[sizes.get(name.split(".")[-2], "hidden")]
            tensors[name] = 1 + torch.randn(size, generator=draw) / 8
    return tensors


def attention_by_formula(
    x: Tensor, tensors: Mapping[str, Tensor], config: TextConfig, pairs: bool = True
) -> Tensor:
    """x (T, H) of one sequence from its first token on -> (T, H), float64; yarn as in `YARN`, or none."""
    names = [name for name in tensors if name.startswith(PREFIX) and name.endswith(".weight")]
    matrix = {name.split(".")[-2]: tensors[name].double() for name in names}
    latent, x = config.latent, x.double()
    assert latent is not None
    if latent.q_rank is None:
        q = x @ matrix["q_proj"].T
    else:
        q = _normed(x @ matrix["q_a_proj"].T, matrix["q_a_layernorm"]) @ matrix["q_b_proj"].T
    compressed = x @ matrix["kv_a_proj_with_mqa"].T
    rope_key = _turned(compressed[:, latent.kv_rank :], config, pairs)
    both = _normed(compressed[:, : latent.kv_rank], matrix["kv_a_layernorm"]) @ matrix["kv_b_proj"].T
    outputs = []
    for head in range(config.heads):
        own = q[:, head * latent.key_size : (head + 1) * latent.key_size]
        own = torch.cat([own[:, : latent.nope_size], _turned(own[:, latent.nope_size :], config, pairs)], 1)
        width = latent.nope_size + latent.value_size
        of_head = both[:, head * width : (head + 1) * width]
        key = torch.cat([of_head[:, : latent.nope_size], rope_key], 1)
        grown = (
            0.1 * YARN["mscale_all_dim"] * math.log(YARN["factor"]) + 1 if config.rope.type == "yarn" else 1
        )
        scores = own @ key.T * grown**2 / math.sqrt(latent.key_size)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        outputs.append(scores.softmax(1) @ of_head[:, latent.nope_size :])
    return torch.cat(outputs, 1) @ matrix["o_proj"].T


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight


def _turned(x: Tensor, config: TextConfig, pairs: bool) -> Tensor:
    """x (T, D) turned by the position of each row, as complex numbers; yarn's ramp in numbers of Python."""
    D, theta = x.shape[1], 100.0
    frequencies, grown = [theta ** (-2 * j / D) for j in range(D // 2)], 1.0
    if config.rope.type == "yarn":
        ends = [D * math.log(64 / (2 * math.pi * turns)) / (2 * math.log(theta)) for turns in (16, 2)]
        low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), D - 1)
        ramp = [min(max((j - low) / (high - low), 0), 1) for j in range(D // 2)]
        frequencies = [f / 8 * part + f * (1 - part) for f, part in zip(frequencies, ramp, strict=True)]
        grown = (0.0707 * math.log(8) + 1) / (0.05 * math.log(8) + 1)
    angles = torch.arange(x.shape[0]).double()[:, None] * torch.tensor(frequencies).double()
    first, second = (x[:, 0::2], x[:, 1::2]) if pairs else x.chunk(2, 1)
    turned = torch.complex(first, second) * torch.polar(torch.full_like(angles, grown), angles)
    return torch.cat([turned.real, turned.imag], 1)  # queries and keys alike, so that scores stay
