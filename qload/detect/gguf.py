"""Models in GGUF files: the names of transformers for their tensors, and the config of the keys.

llama.cpp's converters rename tensors, interleave the rows of queries and keys of some architectures, stack
experts, and add 1 to some norms. `name_tensors` takes all of that back; an architecture without a row in
`ARCHITECTURES` keeps the names and values of the file. `config_of_keys` returns the keys of a config.json.
Source: the conversion package of llama.cpp as vendored by llama-cpp-python 0.3.36, and gguf 0.19.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qload.configs import FoundConfig
from qload.errors import StorageError
from qload.storage import GGUFEntry, TensorView
from qload.storage.gguf_header import ArrayLength

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
ENDS = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
MIXTRAL_EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
FUSED_EXPERTS = "ffn_gate_up_exps"
HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z0-9_]+)\.(weight|bias|scale|input_scale)")
END = re.compile(r"([a-z_]+)\.(weight|bias|scale|input_scale)")
MAX_EXPERTS = 1 << 12


@dataclass(frozen=True)
class GGUFArchitecture:
    """Conversion of an architecture by llama.cpp.

    Attributes
    ----------
    model_type
        Its `model_type` in transformers.
    names
        Names of a layer's tensors that differ from `NAMES`.
    interleaved
        Whether rows of queries and keys are interleaved within a head.
    norm_shift
        Number added to the weights of norms.
    experts, experts_lead, experts_key
        Last part of the names of an expert's matrices, the name of the experts, and the key of their number.
    tensors
        Tensors without a suffix in transformers, by their names with a suffix.
    config, rope
        Further keys of the config, and of its scaling of rope.
    """

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    norm_shift: float = 0.0
    experts: Mapping[str, str] = field(default_factory=lambda: EXPERTS)
    experts_lead: str = "mlp.experts"
    experts_key: str = "num_experts"
    tensors: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)


MIXTRAL = GGUFArchitecture(
    "mixtral",
    {"ffn_gate_inp": "block_sparse_moe.gate"},
    interleaved=True,
    experts=MIXTRAL_EXPERTS,
    experts_lead="block_sparse_moe.experts",
    experts_key="num_local_experts",
)
ARCHITECTURES = {
    "llama": GGUFArchitecture("llama", interleaved=True),  # Mistral too; with experts it is Mixtral
    "qwen2": GGUFArchitecture("qwen2"),
    "qwen3": GGUFArchitecture("qwen3"),
    "qwen3moe": GGUFArchitecture("qwen3_moe", config={"norm_topk_prob": True}),
    "gemma": GGUFArchitecture("gemma", norm_shift=1.0),
    "gemma2": GGUFArchitecture("gemma2", FOUR_NORMS, norm_shift=1.0),
    "gemma3": GGUFArchitecture("gemma3_text", FOUR_NORMS, norm_shift=1.0),
    "phi3": GGUFArchitecture("phi3", {"ffn_up": "mlp.gate_up_proj"}),
    "gpt-oss": GGUFArchitecture(
        "gpt_oss",
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        experts_key="num_local_experts",
        tensors={"attn_sinks.weight": "self_attn.sinks"},
        rope={"truncate": False},  # llama.cpp rounds the ends of the ramp, and transformers does not
    ),
}
OTHER_KINDS = {  # general.type, or general.architecture -> description and remedy
    "imatrix": ("an importance matrix of llama.cpp", "llama-quantize reads it by --imatrix"),
    "adapter": ("a LoRA adapter", "llama.cpp adds it to its base model by --lora"),
    "mmproj": ("the vision or audio part of a model", "name the GGUF file of the text model"),
    "clip": ("the vision or audio part of a model", "name the GGUF file of the text model"),
    "vocab": ("a vocabulary", "name the GGUF file of the model"),
}
SIZES = {  # key of config.json -> key of the architecture
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "sliding_window": "attention.sliding_window",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
UNSCALED = ("none", None)
YARN_RAMP = ("beta_fast", "beta_slow")
ROPE_FACTORS = "rope_freqs.weight"  # divisors of rope's frequencies, written for Llama 3
ORIGINAL = "original_max_position_embeddings"
# Settings of all releases, which the file does not have.
LOW, HIGH = 1.0, 4.0
LLAMA3_SCALING: Mapping[str, float] = {"low_freq_factor": LOW, "high_freq_factor": HIGH, ORIGINAL: 8192}


def refuse_other_kinds(keys: Mapping[str, Any], file: str) -> None:
    """Raise StorageError, rule `unsupported-format`, for a GGUF file of anything but a model."""
    for key in ("general.type", "general.architecture"):
        kind = OTHER_KINDS.get(keys.get(key, "")) if isinstance(keys.get(key), str) else None
        if kind is not None:
            words, remedy = kind
            raise StorageError(file, "unsupported-format", f"is {words} ({key}), not a model", remedy=remedy)


def found_config(file: str, keys: Mapping[str, Any]) -> FoundConfig:
    """Return the quantization config of a GGUF file, whose tensors have the type of their blocks."""
    refuse_other_kinds(keys, file)
    return FoundConfig(file, "", {"quant_method": "gguf"})


def architecture_of_keys(keys: Mapping[str, Any]) -> GGUFArchitecture | None:
    """Return the conversion of the architecture in the keys; None for an unknown one."""
    name = keys.get("general.architecture")
    if name == "llama" and keys.get("llama.expert_count"):
        return MIXTRAL
    return ARCHITECTURES.get(name) if isinstance(name, str) else None


def unknown_architecture(keys: Mapping[str, Any]) -> str:
    """Return the note on an architecture without a row in `ARCHITECTURES`; "" for a known one."""
    if architecture_of_keys(keys):
        return ""
    name = f"{keys.get('general.architecture')!r:.80}"
    return f"general.architecture is {name}: tensors keep the names, row order and values of the file"


def name_tensors(
    keys: Mapping[str, Any], tensors: Mapping[str, GGUFEntry], file: str
) -> dict[str, TensorView]:
    """Views of all tensors under the names of transformers, where these are known.

    StorageError for two tensors of one name.
    """
    known = architecture_of_keys(keys)
    views: dict[str, TensorView] = {}
    for source, entry in tensors.items():
        named = dict(_views(known, keys, source, entry)) if known else {}
        named = named or dict(_own_views(source, entry))
        if not views.keys().isdisjoint(named):
            name = next(name for name in named if name in views)
            words = f"is {name} of the model, and so is {views[name].source}"
            raise StorageError(file, "duplicate-tensor", words, source)
        views.update(named)
    return views


def _own_views(source: str, entry: GGUFEntry) -> Iterator[tuple[str, TensorView]]:
    """Yield a tensor under its own name, or each expert of a stack with its number: `blk.0.ffn_up_exps.3`."""
    block = BLOCK.fullmatch(source)
    if block is None or not block[2].endswith("_exps"):
        yield source, TensorView(source)
        return
    for expert in range(min(entry.shape[0], MAX_EXPERTS)):
        yield f"blk.{block[1]}.{block[2]}.{expert}.{block[3]}", TensorView(source, index=expert)


def _views(
    known: GGUFArchitecture, keys: Mapping[str, Any], source: str, entry: GGUFEntry
) -> Iterator[tuple[str, TensorView]]:
    """Yield name and view of each tensor of the model that is stored in one of the file."""
    if end := END.fullmatch(source):
        if end[1] in ENDS:
            shift = known.norm_shift if end[1] == "output_norm" else 0.0
            yield f"{ENDS[end[1]]}.{end[2]}", TensorView(source, shift=shift)
        return
    block = BLOCK.fullmatch(source)
    if block is None:
        return
    lead, stem, suffix = f"model.layers.{block[1]}", block[2], block[3]
    if place := known.tensors.get(f"{stem}.{suffix}"):
        yield f"{lead}.{place}", TensorView(source)
        return
    if stem in known.experts or stem == FUSED_EXPERTS:
        names = [known.experts[stem]] if stem in known.experts else list(known.experts.values())[:2]
        for expert in range(min(entry.shape[0], MAX_EXPERTS)):
            for part, last in enumerate(names):
                run = (part, len(names)) if suffix in ("weight", "bias") else (0, 1)
                yield f"{lead}.{known.experts_lead}.{expert}.{last}.{suffix}", TensorView(source, expert, run)
        return
    if stem not in known.names and stem not in NAMES:
        return
    name = known.names.get(stem) or NAMES[stem]
    heads = _heads(keys, stem, int(block[1])) if known.interleaved and suffix in ("weight", "bias") else 0
    if heads and (entry.shape[0] % (2 * heads)):
        return
    shift = known.norm_shift if "norm" in stem and suffix == "weight" else 0.0
    yield f"{lead}.{name}.{suffix}", TensorView(source, heads=heads, shift=shift)


def _heads(keys: Mapping[str, Any], stem: str, layer: int) -> int:
    """Heads of a tensor of queries or keys; 0 for any other tensor."""
    if stem not in HEADS:
        return 0
    architecture = keys["general.architecture"]
    stated = [keys.get(f"{architecture}.{key}") for key in (HEADS[stem], HEADS["attn_q"])]
    value = stated[0] if stated[0] is not None else stated[1]
    if isinstance(value, list):
        value = value[layer] if layer < len(value) else 0
    return value if type(value) is int and value > 0 else 0


def config_of_keys(keys: Mapping[str, Any], tensors: Mapping[str, GGUFEntry]) -> dict[str, Any]:
    """Return the keys of config.json for a GGUF model; the name alone for an unknown architecture."""
    known = architecture_of_keys(keys)
    if known is None:
        return {"model_type": f"GGUF's {keys.get('general.architecture')!s:.80}"}
    lead = keys["general.architecture"]
    config: dict[str, Any] = {"model_type": known.model_type, **known.config}
    for name, key in SIZES.items():
        value = _one_value(keys.get(f"{lead}.{key}"))
        if value is not None:
            config[name] = value
    rotated = keys.get(f"{lead}.rope.dimension_count")
    if type(rotated) is int:
        whole = config.setdefault("head_dim", rotated) if known.interleaved else config.get("head_dim")
        if type(whole) is int and whole > 0 and rotated != whole:
            config["partial_rotary_factor"] = rotated / whole
    if "vocab_size" not in config and "token_embd.weight" in tensors:
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    experts = keys.get(f"{lead}.expert_count")
    if experts is not None:
        config[known.experts_key] = experts
    scaling = _rope_scaling(keys, lead)
    if scaling is not None or known.rope:  # without a scaling the type of model may have one
        config["rope_scaling"] = {"rope_type": "default"} if scaling is None else {**scaling, **known.rope}
    eos = keys.get("tokenizer.ggml.eos_token_id")
    return {**config, "eos_token_id": eos, "tie_word_embeddings": "output.weight" not in tensors}


def _one_value(value: Any) -> Any:
    """Value of all layers, of a list of equal ones; any other list stays, and is no size."""
    if isinstance(value, ArrayLength):
        return [value.count]
    return value[0] if isinstance(value, list) and len(set(value)) == 1 else value


def _llama3_turns(theta: float, size: int) -> NDArray[np.float64]:
    """Return the turns of each frequency within the original context; `size`: rotated elements of a head."""
    turns: NDArray[np.float64] = (
        LLAMA3_SCALING[ORIGINAL] / (2 * np.pi) * theta ** -(np.arange(0, size, 2) / size)
    )
    return turns


def llama3_factors(theta: float, size: int, factor: float) -> NDArray[np.float64]:
    """Return the divisors of the frequencies for the scaling of Llama 3, as in `rope_freqs.weight`."""
    smooth = ((_llama3_turns(theta, size) - LOW) / (HIGH - LOW)).clip(0, 1)
    factors: NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return factors


def scaling_of_factors(factors: NDArray[np.float32], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling of Llama 3 that has these divisors of the frequencies, as in `rope_freqs.weight`.

    The type is "rope_freqs.weight", which no model reads, if the divisors follow from no such scaling.
    """
    unknown = {"rope_type": ROPE_FACTORS}
    theta, size = config.get("rope_theta"), 2 * factors.size
    if not isinstance(theta, float) or not theta > 1 or not factors.size or not np.isfinite(factors).all():
        return unknown
    factor = float(factors.max())
    turns, expected = _llama3_turns(theta, size), llama3_factors(theta, size, max(factor, 1.0))
    # The writer rounds theta ** -x to float32, an error of log(theta) units, and a few operations after it.
    units = 2 + (np.log(theta) + 4) * turns / (HIGH - LOW) * expected
    close = np.abs(factors / expected - 1) <= units * np.finfo(np.float32).eps
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_SCALING} if close.all() else unknown


def _rope_scaling(keys: Mapping[str, Any], lead: str) -> dict[str, Any] | None:
    """Scaling of rope; None without any."""
    kind = keys.get(f"{lead}.rope.scaling.type")
    if kind in UNSCALED:
        return None
    scaling = {
        "rope_type": kind,
        "factor": keys.get(f"{lead}.rope.scaling.factor"),
        ORIGINAL: keys.get(f"{lead}.rope.scaling.original_context_length"),
        **{name: keys.get(f"{lead}.rope.scaling.yarn_{name}") for name in YARN_RAMP},
    }
    return {key: value for key, value in scaling.items() if value is not None}
