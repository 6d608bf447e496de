"""Tiny random models of transformers, drawn so that ranks can share them, and the logits that it gives."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

KINDS = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "llama4_text",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite",
)  # fmt: skip
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite")
ROUTED = (
    "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group",
    "routed_scaling_factor",
)  # fmt: skip


def config(kind: str, seed: int, **said: Any) -> Any:
    """A config of a type, drawn from a seed, whose heads, widths and experts eight ranks can share."""
    chance = random.Random(f"{kind} {seed}")
    layers = said.get("num_hidden_layers", chance.choice([1, 2, 4]))
    base = {
        "vocab_size": chance.choice([61, 64, 90]),
        "hidden_size": chance.choice([32, 48]),
        "intermediate_size": chance.choice([40, 64]),
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8 if kind in LATENT else chance.choice([1, 2, 4, 8]),
        "max_position_embeddings": 64,
        "rms_norm_eps": chance.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": chance.random() < 0.3,
        "rope_parameters": rope(chance, kind),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    drawn = AutoConfig.for_model(kind, **{**base, **of_kind(kind, chance, layers), **said})
    drawn._attn_implementation = "eager"
    drawn._experts_implementation = "eager"
    return drawn


def rope(chance: random.Random, kind: str) -> dict[str, Any]:
    """One of the types of rope that there are formulas for."""
    base = {"rope_theta": chance.choice([100.0, 1e4, 5e5])}
    scaled = {"factor": chance.choice([1.5, 4.0]), "original_max_position_embeddings": 16}
    low, high = chance.choice([(1.0, 4.0), (0.5, 2.0)])
    scales = chance.choice([{}, {"mscale": 0.8, "mscale_all_dim": 0.6}, {"attention_factor": 1.3}])
    yarn = {"beta_fast": chance.choice([4.0, 32.0]), "truncate": chance.random() < 0.5, **scales}
    return {
        **base,
        **chance.choice(
            [
                {"rope_type": "default"},
                {"rope_type": "linear", "factor": 3.0},
                {"rope_type": "llama3", **scaled, "low_freq_factor": low, "high_freq_factor": high},
                {"rope_type": "yarn", **scaled, **yarn},
            ]
        ),
    }


def of_kind(kind: str, chance: random.Random, layers: int) -> dict[str, Any]:
    """What a type has beside: flags, windows, experts."""

    def coin() -> bool:
        return chance.random() < 0.5

    head, bias = {"head_dim": chance.choice([8, 12])}, {"attention_bias": coin()}
    windows = {"use_sliding_window": coin(), "sliding_window": 5, "max_window_layers": layers // 2}
    experts = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
    latent = {
        "q_lora_rank": chance.choice([None, 20]),
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "n_shared_experts": chance.choice([1, 2]),
        "first_k_dense_replace": chance.choice([0, 1]),
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        **experts,
        **bias,
    }
    return {
        "llama": {**bias, "mlp_bias": coin(), **(head if coin() else {})},
        "mistral": {**head, "sliding_window": chance.choice([None, 5])},
        "gemma": head,
        "qwen2": windows,
        "qwen3": {**bias, **head, **windows},
        "mixtral": {"num_local_experts": 8, "sliding_window": chance.choice([None, 5]), **head},
        "qwen3_moe": {
            "num_local_experts": 8,
            "decoder_sparse_step": chance.choice([1, 2]),
            "mlp_only_layers": chance.choice([[], [0]]),
            "norm_topk_prob": coin(),
            **experts, **bias, **head, **windows,
        },
        "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 5, **bias, **head},
        "llama4_text": {
            "num_local_experts": 8,
            "num_experts_per_tok": chance.choice([1, 2]),
            "intermediate_size_mlp": 56,
            "interleave_moe_layer_step": chance.choice([1, 2]),
            "attention_chunk_size": 5,
            "no_rope_layers": [int(n % 2 == 0) for n in range(layers)],
            "floor_scale": 4,
            "attn_temperature_tuning": coin(),
            "use_qk_norm": coin(),
            **bias, **head,
        },
        "deepseek_v2": {**latent, "topk_method": chance.choice(["greedy", "group_limited_greedy"])},
        "deepseek_v3": {**latent, "norm_topk_prob": coin(), "rope_interleave": coin()},
        "deepseek_v32": {
            **latent, "q_lora_rank": 20, "norm_topk_prob": coin(), "head_dim": 4,
            "index_n_heads": 16, "index_head_dim": 32, "index_topk": chance.choice([3, 7, 64]),
        },
        "glm4_moe": {
            **{key: latent[key] for key in ROUTED}, **experts, **bias, **head,
            "norm_topk_prob": coin(), "use_qk_norm": coin(),
            **({"partial_rotary_factor": 1.0} if coin() else {}),
        },
        "glm4_moe_lite": {
            **{key: value for key, value in latent.items() if key != "first_k_dense_replace"},
            "norm_topk_prob": coin(), "rope_interleave": coin(),
            **({"mlp_layer_types": ["sparse"] * layers} if coin() else {}),
        },
    }[kind]  # fmt: skip


def written(config: Any, folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """A model of random numbers, as save_pretrained writes it; no tensor is what it begins as."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            drawn = torch.randn(tensor.shape, generator=generator)
            if "inv_freq" in name:
                continue
            if tensor.ndim == 1:
                tensor.copy_((1 if name.endswith("norm.weight") else 0) + drawn / 4)
            else:
                tensor.copy_(drawn * config.hidden_size**-0.5)
    model.save_pretrained(folder)
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def logits(folder: Path, ids: Tensor) -> Tensor:
    """What transformers makes of the model in a folder, in float32: (S, Q, vocab)."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(ids).logits


def folder_of(config: Any, tensors: dict[str, Tensor], folder: Path) -> Path:
    """A folder that holds a config and tensors."""
    folder.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config.save_pretrained(folder)
    return folder
