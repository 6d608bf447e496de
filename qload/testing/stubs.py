"""Tiny configs of every type of model: all that a loader looks at, and a few kilobytes of weights."""

from collections.abc import Mapping
from typing import Any

from qload.errors import ArgumentError

SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4}
YARN: Mapping[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LATENT: Mapping[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    **EXPERTS,
}
OWN: Mapping[str, Mapping[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "rope_parameters": YARN,
    },
    "llama4_text": {
        "num_local_experts": 4,
        "intermediate_size_mlp": 56,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 5,
        "no_rope_layers": [1, 0],
        "floor_scale": 4,
    },
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    "deepseek_v3": {**LATENT, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
}


def stub_config(kind: str, **said: Any) -> dict[str, Any]:
    """A tiny `config.json` of the type `kind`, one of those that qload runs; `said`: what is different.

    ArgumentError for another type.
    """
    if kind not in OWN:
        raise ArgumentError("model", f"one of {', '.join(OWN)}", repr(kind[:80]))
    made = {"model_type": kind, **SIZES, **OWN[kind], **said}
    return {key: value for key, value in made.items() if kind[:8] != "deepseek" or key != "head_dim"}
