"""What configs say of text models, in both spellings, and what they say that nobody can act on."""

from collections import Counter
from typing import Any

import pytest
import torch

from qload.architecture.architecture import architecture_of
from qload.architecture.model_tables import TABLES
from qload.errors import ConfigError
from qload.experts import GatedActivation
from qload.models import FAMILIES, text_config
from qload.models.config import LATENT_TYPES, Mask
from tests.models.drawn import SIZES

pytestmark = pytest.mark.usefixtures("seen_texts")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 32,
    "max_position_embeddings": 128,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "truncate": False}


GENERATED = {  # sizes of a type without defaults of them
    **{key: size for key, size in SIZES.items() if key not in ("max_position_embeddings", "rms_norm_eps")},
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "first_k_dense_replace": 1,
}


def bare(kind: str) -> dict[str, Any]:
    """A config of a type with required entries only."""
    entries = {"deepseek_v2": {"num_experts_per_tok": 6}}.get(kind, {}) if kind in TABLES else GENERATED
    return {"model_type": kind, **entries}


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_type_has_a_model_of_its_defaults(kind: str) -> None:
    config = text_config(bare(kind))

    assert config.heads % config.kv_heads == 0
    assert len(config.masks) == config.layers
    assert (config.routing is None) == (not config.sparse_layers)
    assert (config.expert_inner > 0) == bool(config.sparse_layers)
    assert config.inner or len(config.sparse_layers) == config.layers


# Of a type: epsilon, positions, ends of text, type, base and factor of rope, masks, and their layers.
FULL = Mask()
DEFAULTS: dict[str, tuple[float, int, tuple[int, ...], str, float, float, dict[Mask, int]]] = {
    "llama": (1e-6, 2048, (2,), "default", 1e4, 1, {FULL: 32}),
    "mistral": (1e-6, 131072, (2,), "default", 1e4, 1, {Mask(4096): 32}),
    "qwen2": (1e-6, 32768, (), "default", 1e4, 1, {FULL: 32}),
    "qwen3": (1e-6, 32768, (), "default", 1e4, 1, {FULL: 32}),
    "mixtral": (1e-5, 131072, (2,), "default", 1e6, 1, {FULL: 32}),
    "qwen3_moe": (1e-6, 32768, (), "default", 1e4, 1, {FULL: 24}),
    "gpt_oss": (1e-5, 131072, (), "yarn", 150000, 32, {Mask(128): 18, FULL: 18}),
    "llama4_text": (1e-5, 131072, (2,), "default", 5e5, 1, {Mask(None, 8192): 36, Mask(rotary=False): 12}),
    "deepseek_v2": (1e-6, 2048, (2,), "default", 1e4, 1, {FULL: 32}),
    "deepseek_v3": (1e-6, 4096, (1,), "default", 1e4, 1, {FULL: 61}),
    "deepseek_v32": (1e-6, 163840, (1,), "default", 1e4, 1, {FULL: 2}),
    "glm4_moe": (1e-5, 131072, (), "default", 1e4, 1, {FULL: 2}),
    "glm4_moe_lite": (1e-5, 202752, (1,), "default", 1e4, 1, {FULL: 2}),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_config_leaves_out_is_as_its_owner_has_it(kind: str) -> None:
    """The config classes of transformers 5.23.0."""
    config = text_config(bare(kind))

    rope, masks = config.rope, dict(Counter(config.masks))
    assert (config.eps, config.positions, config.eos, rope.type, rope.theta, rope.factor, masks) == DEFAULTS[
        kind
    ]
    assert config.activation == GatedActivation("silu")
    assert rope.pairs == (kind in ("llama4_text", *LATENT_TYPES))
    assert config.sinks == (kind == "gpt_oss")
    norms = {"qwen3": "before rope", "qwen3_moe": "before rope", "llama4_text": "after rope"}
    assert config.head_norm == norms.get(kind, "none")
    assert (FULL.window, FULL.chunk, FULL.rotary) == (None, None, True)


def test_a_window_that_is_switched_on_begins_at_the_layer_of_its_type() -> None:
    switched = {"num_hidden_layers": 30, "use_sliding_window": True}

    qwen2, moe = (text_config({**LLAMA, "model_type": each, **switched}) for each in ("qwen2", "qwen3_moe"))

    assert [mask.window for mask in qwen2.masks] == [None] * 28 + [4096] * 2
    assert {mask.window for mask in moe.masks} == {4096}


def test_rope_parameters_that_are_left_out_are_those_of_transformers() -> None:
    llama3 = text_config({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}).rope
    yarn = text_config({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}).rope

    assert (llama3.low_freq_factor, llama3.high_freq_factor, llama3.original) == (1, 4, 128)
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate, yarn.original) == (32, 1, True, 128)
    assert (yarn.attention_factor, yarn.mscale, yarn.mscale_all_dim) == (None, None, None)


@pytest.mark.parametrize(
    "said",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "type": "linear", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}},
        {"rope_parameters": {"rope_type": "yarn", **YARN}, "rope_theta": 5e5},
    ],
)
def test_rope_is_the_same_in_the_spellings_of_the_hub_and_of_transformers(said: dict[str, Any]) -> None:
    rope = text_config({**LLAMA, **said}).rope

    assert (rope.type, rope.theta, rope.dim, rope.factor, rope.original) == ("yarn", 5e5, 16, 4.0, 32)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate, rope.mscale) == (16, 1, False, None)


def test_rope_that_is_not_said_is_that_of_the_type() -> None:
    assert text_config({**LLAMA, "rope_scaling": None}).rope.theta == 10000.0
    assert text_config({**LLAMA, "model_type": "mixtral"}).rope.theta == 1e6
    oss = text_config({**LLAMA, "model_type": "gpt_oss"}).rope
    assert (oss.type, oss.factor, oss.theta, oss.truncate, oss.original) == ("yarn", 32, 150000, False, 4096)
    without = {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 32}}
    assert text_config({**LLAMA, **without}).rope.factor == 4.0  # of 128 positions


@pytest.mark.parametrize(
    ("key", "limit", "next_one", "expected"),
    [
        ("num_hidden_layers", 4096, 4097, "at most 4096"),
        ("num_hidden_layers", 1, 0, "a size of at least 1"),
        ("head_dim", 1 << 16, (1 << 16) + 2, "at most 65536"),
        ("num_attention_heads", 1, 0, "a size of at least 1"),
        ("max_position_embeddings", 1 << 31, (1 << 31) + 1, "less than or equal to 2147483648"),
        ("max_position_embeddings", 1, 0, "greater than or equal to 1"),
        ("rms_norm_eps", 1.0, 1.5, "less than or equal to 1"),
        ("rms_norm_eps", 0.0, -1e-9, "greater than or equal to 0"),
    ],
)
def test_the_last_lawful_size_is_taken_and_the_next_one_refused(
    key: str, limit: float, next_one: float, expected: str
) -> None:
    model = {**LLAMA, "num_key_value_heads": 1}
    text_config({**model, key: limit})

    with pytest.raises(ConfigError) as caught:
        text_config({**model, key: next_one})

    assert (caught.value.key, caught.value.expected, caught.value.got) == (key, expected, f"{next_one}")


def test_the_original_positions_of_the_rope_precede_those_of_the_model() -> None:
    model = {**LLAMA, "original_max_position_embeddings": 32}
    rope = {"rope_type": "yarn", "factor": 4.0}

    assert text_config({**model, "rope_parameters": rope}).rope.original == 32
    own = {**rope, "original_max_position_embeddings": 64}
    assert text_config({**model, "rope_parameters": own}).rope.original == 64


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope"},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": True},
        {"rope_type": "default", "rope_theta": 0},
        {"rope_type": "default", "rope_theta": float("inf")},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
        ["default"],
    ],
    ids=str,
)
def test_rope_that_is_not_known_or_no_number_is_refused_by_its_key(rope: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        text_config({**LLAMA, "rope_parameters": rope})
    assert refusal.value.key.startswith("rope_parameters")


def test_a_share_of_a_head_is_rotated_where_the_type_has_one() -> None:
    model = {**bare("glm4_moe"), "head_dim": 12}
    whole = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}

    assert text_config(model).rope.dim == 6
    assert text_config({**model, **whole, "partial_rotary_factor": 0.5}).rope.dim == 12
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        text_config({**LLAMA, "partial_rotary_factor": 0.5})


@pytest.mark.parametrize("key", ["n_shared_experts", "moe_intermediate_size", "first_k_dense_replace"])
def test_a_part_of_a_layer_is_not_left_out_for_an_unknown_size(key: str) -> None:
    with pytest.raises(ConfigError):
        text_config({name: value for name, value in bare("glm4_moe").items() if name != key})


def test_layers_with_experts_follow_from_the_type_without_their_list() -> None:
    lite = {**bare("glm4_moe_lite"), "num_hidden_layers": 3}

    assert text_config(lite).sparse_layers == {1, 2}
    assert text_config({**lite, "mlp_layer_types": ["sparse", "dense", "dense"]}).sparse_layers == {0}
    architecture = architecture_of(lite)
    assert architecture is not None
    required = set(architecture.required())
    assert "model.layers.0.mlp.gate_proj" in required
    assert not required & {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate_proj"}


def test_rope_of_some_layers_alone_is_refused_by_the_layers() -> None:
    with pytest.raises(ConfigError) as refusal:
        text_config({**LLAMA, "rope_parameters": {"sliding_attention": {"rope_type": "default"}}})
    assert refusal.value.key == "rope_parameters.sliding_attention"
    assert (refusal.value.expected, refusal.value.got) == (
        "one rope for all layers",
        "parameters per type of layer",
    )


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"model_type": "gemma2"}, "model_type"),
        ({"model_type": "never heard of"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_attention_heads": -4}, "num_attention_heads"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": 1 << 40}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"model_type": "llama4_text", "floor_scale": float("inf")}, "floor_scale"),
        ({"model_type": "llama4_text", "attn_scale": 0}, "attn_scale"),
        ({"hidden_act": "relu2"}, "hidden_act"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"eos_token_id": ["2"]}, "eos_token_id"),
    ],
    ids=str,
)
def test_what_cannot_be_believed_is_refused_by_its_key(said: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        text_config({**LLAMA, **said})
    assert refusal.value.key.partition(".")[0] == key


def test_a_type_without_a_model_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"a supported type: llama, mistral, qwen2, .*deepseek_v3"):
        text_config({"model_type": "bloom"})


def test_the_text_of_a_model_that_sees_too_is_meant_and_its_config_stays_as_it_is() -> None:
    outer = {"model_type": "idefics2", "text_config": {**LLAMA, "model_type": "mistral"}, "vision_config": {}}
    before = repr(outer)

    config = text_config(outer)

    assert (config.type, config.hidden, config.masks[0].window) == ("mistral", 64, 4096)
    assert repr(outer) == before
    with pytest.raises(ConfigError, match=r"text_config\.head_dim"):
        text_config({**outer, "text_config": {**LLAMA, "head_dim": 15}})


def test_qwen3_moe_counts_its_experts_in_either_spelling() -> None:
    for key in ("num_experts", "num_local_experts"):
        config = text_config({**LLAMA, "model_type": "qwen3_moe", key: 6, "num_experts_per_tok": 2})
        assert config.routing is not None
        assert config.routing.experts == 6


def test_dtype_is_read_in_both_spellings_and_guessed_in_none() -> None:
    assert text_config({**LLAMA, "dtype": "bfloat16"}).dtype is torch.bfloat16
    assert text_config({**LLAMA, "torch_dtype": "float16"}).dtype is torch.float16
    assert text_config(LLAMA).dtype is None
    assert text_config({**LLAMA, "dtype": None, "torch_dtype": "int4"}).dtype is None


def test_biases_are_those_that_the_config_promises() -> None:
    qkv, mlp = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert text_config(LLAMA).biases == frozenset()
    assert text_config({**LLAMA, "model_type": "qwen2"}).biases == qkv
    assert text_config({**LLAMA, "attention_bias": True, "mlp_bias": True}).biases == qkv | mlp | {"o_proj"}
    assert text_config({**LLAMA, "model_type": "gpt_oss"}).biases == qkv | {"o_proj", "router"}


def test_layers_of_llama_4_without_experts_have_a_width_of_their_own() -> None:
    said = {"model_type": "llama4_text", "intermediate_size_mlp": 160, "interleave_moe_layer_step": 2}
    config = text_config({**LLAMA, **said})

    assert config.sparse_layers == {1}
    assert (config.inner, config.expert_inner, config.shared_inner) == (160, 96, 96)
    assert config.temperature == (8192.0, 0.1)
    assert text_config({**LLAMA, **said, "attn_temperature_tuning": 4}).temperature == (8192.0, 0.1)
    assert text_config({**LLAMA, **said, "attn_temperature_tuning": False}).temperature is None
    assert text_config({**LLAMA, **said, "use_qk_norm": False}).head_norm == "none"
