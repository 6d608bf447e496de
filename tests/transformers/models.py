"""Tiny models of every type that has a table, as transformers itself makes and writes them."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()

HEADS = ((4, 1), (4, 2), (4, 4), (6, 3))


def common(chance: random.Random) -> dict[str, Any]:
    """What nearly every config has, drawn so that no two sizes are alike by mistake."""
    heads, keys = chance.choice(HEADS)
    return {
        "vocab_size": chance.choice([90, 96, 128]),
        "hidden_size": heads * chance.choice([8, 16]),
        "intermediate_size": chance.choice([40, 56, 72]),
        "num_hidden_layers": chance.choice([1, 2, 5]),
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": 64,
        "tie_word_embeddings": chance.random() < 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def extras(kind: str, chance: random.Random, layers: int) -> dict[str, Any]:
    """What a type has beside, flags above all."""

    def coin() -> bool:
        return chance.random() < 0.5

    experts = {
        "num_experts": 5,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    latent = {
        "q_lora_rank": chance.choice([None, 20]),
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 4,
        "n_shared_experts": chance.choice([1, 2]),
        "first_k_dense_replace": chance.choice([0, 1]),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": coin(),
    }
    steps = {
        **experts,
        "decoder_sparse_step": chance.choice([1, 2]),
        "mlp_only_layers": chance.choice([[], [0], list(range(layers))]),
    }
    bias, head = {"attention_bias": coin()}, {"head_dim": chance.choice([8, 20])}
    return {
        "llama": {**bias, "mlp_bias": coin(), **(head if coin() else {})},
        "mistral": head if coin() else {},
        "qwen2": {},
        "qwen3": {**bias, **head},
        "gemma": {**bias, **head},
        "gemma2": {**bias, **head},
        "gemma3_text": {**bias, **head},
        "phi3": {},
        "mixtral": {"num_local_experts": 3},
        "qwen2_moe": {**steps, "shared_expert_intermediate_size": 28, "qkv_bias": coin()},
        "qwen3_moe": {**steps, **bias, **head},
        "gpt_oss": {"num_local_experts": 3, **bias, **head},
        "llama4_text": {
            "num_local_experts": 3,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": chance.choice([1, 2]),
            **bias,
            **head,
        },
        "deepseek_v2": latent,
        "deepseek_v3": latent,
        "phi": {"qk_layernorm": coin()},
        "starcoder2": {"use_bias": coin()},
        "gpt_neox": bias,
        "bloom": {},
    }[kind]


def tiny(kind: str, seed: int) -> Any:
    """A config of a type, drawn from a seed."""
    chance = random.Random(f"{kind} {seed}")
    base = common(chance)
    if kind == "phi":  # whose norms of heads ask for all of them
        base["num_key_value_heads"] = base["num_attention_heads"]
    return AutoConfig.for_model(kind, **{**base, **extras(kind, chance, base["num_hidden_layers"])})


def written(config: Any, folder: Path) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a model, as save_pretrained writes them."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return stored(folder)


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a folder's tensors."""
    shapes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes
