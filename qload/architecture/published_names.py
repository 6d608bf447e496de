"""Names in transformers of tensors that are published under other names.

    DeepSeek V4     layers.0.attn.wq_a.weight, layers.0.attn.wq_a.scale
    transformers    model.layers.0.self_attn.q_a_proj.weight, ....q_a_proj.weight_scale_inv

Experts keep `w1`, `w2` and `w3`, from which transformers builds its stacks. Layers under `mtp` keep their
names, and transformers ignores them. Source: `conversion_mapping.py` and `modeling_deepseek_v4.py` of
transformers 5.23.0.
"""

from collections.abc import Mapping
from typing import Any

from qload.architecture.names import NUMBER, pattern_of

BASE = "model."
PREDICTORS = "mtp."  # prefix of layers that predict further tokens
FIELDS = {"scale": "weight_scale_inv"}  # names of a layer's tensors
PROJECTIONS = {
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
}
COMPRESSOR = {"wkv": "kv_proj", "wgate": "gate_proj", "norm": "kv_norm", "ape": "position_bias"}
INDEXER = {"wq_b": "q_b_proj", "weights_proj": "scorer.weights_proj"}
FEED_FORWARD = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
HYPER_CONNECTION = ("fn", "base", "scale")
DEEPSEEK_V4_LAYER = {
    **{f"attn.{name}": f"self_attn.{new}" for name, new in PROJECTIONS.items()},
    **{f"attn.compressor.{name}": f"self_attn.compressor.{new}" for name, new in COMPRESSOR.items()},
    **{f"attn.indexer.{name}": f"self_attn.compressor.indexer.{new}" for name, new in INDEXER.items()},
    **{
        f"attn.indexer.compressor.{name}": f"self_attn.compressor.indexer.{new}"
        for name, new in COMPRESSOR.items()
    },
    "attn.q_norm": "self_attn.q_a_norm",
    **dict.fromkeys(("attn.kv_norm", "attn.norm"), "self_attn.kv_norm"),  # the second one by transformers
    "attn.attn_sink": "self_attn.sinks",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"hc_{part}_{name}": f"{part}_hc.{name}" for part in ("attn", "ffn") for name in HYPER_CONNECTION},
    "ffn.gate": "mlp.gate",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn.experts.*.{name}": f"mlp.experts.*.{name}" for name in FEED_FORWARD},
    **{f"ffn.shared_experts.{name}": f"mlp.shared_experts.{new}" for name, new in FEED_FORWARD.items()},
}
DEEPSEEK_V4 = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    **{f"hc_head_{name}": f"model.hc_head.hc_{name}" for name in HYPER_CONNECTION},
    **{f"layers.*.{name}": f"model.layers.*.{new}" for name, new in DEEPSEEK_V4_LAYER.items()},
}
PUBLISHED: Mapping[str, Mapping[str, str]] = {  # model_type -> names of layers and tensors, * for a number
    "deepseek_v4": {**DEEPSEEK_V4, **{new.removeprefix(BASE): new for new in DEEPSEEK_V4.values()}}
}


def published_names(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the names in transformers by those of the publisher, for the model type of a config."""
    kind = config.get("model_type")
    return PUBLISHED.get(kind, {}) if isinstance(kind, str) else {}


def transformers_name(config: Mapping[str, Any], name: str) -> str | None:
    """Return the name in transformers of a tensor or of a layer; None if its type of model has none."""
    names = published_names(config)
    if names and name.removeprefix(BASE).startswith(PREDICTORS):
        return name
    stem, field = pattern_of(name).removeprefix(BASE), ""
    if stem not in names:
        stem, _, field = stem.rpartition(".")
    if stem not in names:
        return None
    parts = names[stem].split("*")
    numbers = NUMBER.findall(name)
    renamed = parts[0] + "".join(map("".join, zip(numbers, parts[1:], strict=True)))
    return f"{renamed}.{FIELDS.get(field, field)}" if field else renamed
