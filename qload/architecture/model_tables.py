"""Tables of the supported types of model, by the `model_type` of the config.

Names, shapes and defaults are those of transformers 5.23; `nox -s transformers` checks each table against
tiny models that transformers writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from qload.architecture.table import Flag, Row, Size, Stacked, Table

LAYER = "model.layers.{layer}."
INV_FREQ = {
    "self_attn.rotary_emb.inv_freq": "frequencies of rotary positions, which are computed from the config",
    "rotary_emb.inv_freq": "frequencies of rotary positions, which are computed from the config",
}


def sizes(
    vocab: int,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv: int | str = "heads",
    head: int | None = None,
) -> Mapping[str, Size]:
    """Sizes of a decoder, with their defaults."""
    head_size = "hidden/heads"
    return {
        "vocab": Size(("vocab_size",), vocab),
        "hidden": Size(("hidden_size",), hidden),
        "ffn": Size(("intermediate_size",), ffn),
        "layers": Size(("num_hidden_layers",), layers),
        "heads": Size(("num_attention_heads",), heads),
        "kv": Size(("num_key_value_heads",), kv, "heads"),
        "head": Size(("head_dim",), head or head_size, head_size),
    }


def ends() -> tuple[Row, ...]:
    """Embedding, last norm and head."""
    return (
        Row("model.embed_tokens", "vocab hidden"),
        Row("model.norm.weight", "hidden", tensor=True),
        Row("lm_head", "vocab hidden"),
    )


def norms(*names: str, lead: str = LAYER, bias: bool = False) -> tuple[Row, ...]:
    """Norms of each layer, or of the model with an empty `lead`."""
    suffixes = ("weight", "bias") if bias else ("weight",)
    return tuple(
        Row(f"{lead}{name}.{suffix}", "hidden", tensor=True) for name in names for suffix in suffixes
    )


LAYER_NORMS = norms("input_layernorm", "post_attention_layernorm")


def biased(when: str, *rows: Row) -> tuple[Row, ...]:
    """Matrices, each with a bias required by a flag of the config."""
    return tuple(
        result
        for row in rows
        for result in (
            row,
            Row(
                f"{row.name}.bias",
                row.shape.split()[0],
                row.where,
                f"{row.when} {when}",
                tensor=True,
                within=row.within,
            ),
        )
    )


def attention(bias: str = "", out_bias: str = "", out: str = "o_proj") -> tuple[Row, ...]:
    """Queries, keys, values and output; engines store queries, keys and values fused."""
    lead = f"{LAYER}self_attn."
    fused = (f"{lead}qkv_proj",)
    qkv = (
        Row(f"{lead}q_proj", "heads*head hidden", within=fused),
        Row(f"{lead}k_proj", "kv*head hidden", within=fused),
        Row(f"{lead}v_proj", "kv*head hidden", within=fused),
    )
    last = (Row(f"{lead}{out}", "hidden heads*head"),)
    return (
        *(biased(bias, *qkv) if bias else qkv),
        *(biased(out_bias, *last) if out_bias else last),
        Row(f"{lead}qkv_proj", "heads*head+2*kv*head hidden", optional=True),
    )


def gated(lead: str, width: str, where: str = "", when: str = "", bias: str = "") -> tuple[Row, ...]:
    """Gate, up and down of a feed-forward layer; engines store gate and up fused."""
    fused = (f"{LAYER}{lead}.gate_up_proj",)
    rows = (
        Row(f"{LAYER}{lead}.gate_proj", f"{width} hidden", where, when, fused),
        Row(f"{LAYER}{lead}.up_proj", f"{width} hidden", where, when, fused),
        Row(f"{LAYER}{lead}.down_proj", f"hidden {width}", where, when),
    )
    both = Row(f"{LAYER}{lead}.gate_up_proj", f"2*{width} hidden", where, when, optional=True)
    return (*(biased(bias, *rows) if bias else rows), both)


def experts(
    lead: str,
    router: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    width: str = "moe",
    where: str = "sparse",
) -> tuple[Row, ...]:
    """Router, and gate, up and down of each expert; some programs stack the experts in one tensor."""
    gate, up, down = names
    expert, stack = f"{LAYER}{lead}.experts.", f"{LAYER}{lead}.{{experts|switch_mlp}}."
    both = (f"{stack}gate_up_proj",)
    return (
        Row(f"{LAYER}{router}", "experts hidden", where),
        Row(f"{expert}{{expert}}.{gate}", f"{width} hidden", where, within=(*both, f"{stack}gate_proj")),
        Row(f"{expert}{{expert}}.{up}", f"{width} hidden", where, within=(*both, f"{stack}up_proj")),
        Row(f"{expert}{{expert}}.{down}", f"hidden {width}", where, within=(f"{stack}down_proj",)),
        Row(f"{stack}gate_up_proj", f"2*{width} hidden", where, optional=True),
        Row(f"{stack}{{gate_proj|up_proj}}", f"{width} hidden", where, optional=True),
        Row(f"{stack}down_proj", f"hidden {width}", where, optional=True),
    )


ATTENTION_BIAS = {"attention_bias": Flag("attention_bias")}
ALWAYS_BIASED = {"always": Flag(default=True)}


# Llama and similar decoders: attention, a gated feed-forward layer, two to four norms.
GEMMA_NORMS = (*LAYER_NORMS, *norms("pre_feedforward_layernorm", "post_feedforward_layernorm"))
HEAD_NORMS = tuple(
    Row(f"{LAYER}self_attn.{name}.weight", "head", tensor=True) for name in ("q_norm", "k_norm")
)


def decoder(
    table_sizes: Mapping[str, Size],
    *rows: Row,
    layer_norms: tuple[Row, ...] = LAYER_NORMS,
    flags: Mapping[str, Flag] = MappingProxyType({}),
    **options: Any,
) -> Table:
    """Table of a decoder under Llama's names: embedding, head, the norms of each layer, and `rows`."""
    return Table(table_sizes, (*ends(), *layer_norms, *rows), flags, exempt=INV_FREQ, **options)


BIASED_ATTENTION = attention("attention_bias", "attention_bias")
FEED_FORWARD = gated("mlp", "ffn")
LLAMA = decoder(
    sizes(32000, 4096, 11008, 32, 32),
    *BIASED_ATTENTION,
    *gated("mlp", "ffn", bias="mlp_bias"),
    flags={**ATTENTION_BIAS, "mlp_bias": Flag("mlp_bias")},
)
MISTRAL = decoder(sizes(32000, 4096, 14336, 32, 32, 8), *attention(), *FEED_FORWARD)
QWEN2 = decoder(
    sizes(151936, 4096, 22016, 32, 32, 32), *attention("always"), *FEED_FORWARD, flags=ALWAYS_BIASED
)
QWEN3 = decoder(
    sizes(151936, 4096, 22016, 32, 32, 32, 128),
    *HEAD_NORMS,
    *BIASED_ATTENTION,
    *FEED_FORWARD,
    flags=ATTENTION_BIAS,
)
GEMMA = decoder(
    sizes(256000, 3072, 24576, 28, 16, 16, 256),
    *BIASED_ATTENTION,
    *FEED_FORWARD,
    flags=ATTENTION_BIAS,
    tied=True,
)
GEMMA2 = decoder(
    sizes(256000, 2304, 9216, 26, 8, 4, 256),
    *BIASED_ATTENTION,
    *FEED_FORWARD,
    layer_norms=GEMMA_NORMS,
    flags=ATTENTION_BIAS,
    tied=True,
)
GEMMA3 = replace(GEMMA2, sizes=sizes(262208, 2304, 9216, 26, 8, 4, 256), rows=(*GEMMA2.rows, *HEAD_NORMS))
PHI3 = decoder(sizes(32064, 3072, 8192, 32, 32), *attention(), *FEED_FORWARD)


# DeepSeek V2 and V3: keys and values from a latent vector, shared experts, dense layers first.
LATENT_ATTENTION = f"{LAYER}self_attn."
AFTER_DENSE = {"sparse": "not i < first and experts > 0"}


def latent_sizes(moe: int, experts: int, shared: int, first: int, predict: int) -> Mapping[str, Size]:
    """Sizes of latent attention, and of the layers with experts."""
    return {
        "q_lora": Size(("q_lora_rank",), 1536, 0),
        "kv_lora": Size(("kv_lora_rank",), 512),
        "nope": Size(("qk_nope_head_dim",), 128),
        "rope": Size(("qk_rope_head_dim",), 64),
        "value": Size(("v_head_dim",), 128),
        "moe": Size(("moe_intermediate_size",), moe),
        "experts": Size(("n_routed_experts", "num_local_experts", "num_experts"), experts),
        "shared": Size(("n_shared_experts",), shared),
        "first": Size(("first_k_dense_replace",), first),
        "predict": Size(("num_nextn_predict_layers",), predict),
    }


def without_head_sizes(decoder: Mapping[str, Size]) -> Mapping[str, Size]:
    """Sizes of a decoder without the size and number of key heads."""
    return {name: size for name, size in decoder.items() if name not in ("kv", "head")}


DEEPSEEK_ROWS = (
    *biased("attention_bias", Row(f"{LATENT_ATTENTION}q_a_proj", "q_lora hidden", when="compressed")),
    Row(f"{LATENT_ATTENTION}q_a_layernorm.weight", "q_lora", when="compressed", tensor=True),
    Row(f"{LATENT_ATTENTION}q_b_proj", "heads*nope+heads*rope q_lora", when="compressed"),
    Row(f"{LATENT_ATTENTION}q_proj", "heads*nope+heads*rope hidden", when="!compressed"),
    *biased("attention_bias", Row(f"{LATENT_ATTENTION}kv_a_proj_with_mqa", "kv_lora+rope hidden")),
    Row(f"{LATENT_ATTENTION}kv_a_layernorm.weight", "kv_lora", tensor=True),
    Row(f"{LATENT_ATTENTION}kv_b_proj", "heads*nope+heads*value kv_lora"),
    *biased("attention_bias", Row(f"{LATENT_ATTENTION}o_proj", "hidden heads*value")),
    *gated("mlp", "ffn", "!sparse"),
    *experts("mlp", "mlp.gate"),
    *gated("mlp.shared_experts", "shared*moe", "sparse", "shared"),
)
DEEPSEEK_FLAGS = {**ATTENTION_BIAS, "compressed": Flag(size="q_lora"), "shared": Flag(size="shared")}

DEEPSEEK_V2 = decoder(
    {
        **without_head_sizes(sizes(102400, 4096, 11008, 32, 32)),
        **latent_sizes(moe=1407, experts=64, shared=2, first=0, predict=0),
    },
    *DEEPSEEK_ROWS,
    flags=DEEPSEEK_FLAGS,
    predicates=AFTER_DENSE,
)
DEEPSEEK_V3 = decoder(
    {
        **without_head_sizes(sizes(129280, 7168, 18432, 61, 128)),
        **latent_sizes(moe=2048, experts=256, shared=1, first=3, predict=1),
    },
    *DEEPSEEK_ROWS,
    Row(f"{LAYER}mlp.gate.e_score_correction_bias", "experts", "sparse", tensor=True),
    flags=DEEPSEEK_FLAGS,
    predicates=AFTER_DENSE,
)


# Decoders with experts: transformers' own rules decide from the config which layers have experts.
STEPS = {"sparse": "not i in mlp_only_layers and experts > 0 and (i + 1) % step == 0"}
MIXTRAL_NAMES = ("{w1|gate_proj}", "{w3|up_proj}", "{w2|down_proj}")  # Mixtral's names, and other tools'

MIXTRAL = decoder(
    {**sizes(32000, 4096, 14336, 32, 32, 8), "experts": Size(("num_local_experts", "num_experts"), 8)},
    *attention(),
    *experts("{block_sparse_moe|mlp}", "{block_sparse_moe|mlp}.gate", MIXTRAL_NAMES, "ffn", where=""),
)
QWEN2_MOE = decoder(
    {
        **sizes(151936, 2048, 5632, 24, 16, 16),
        "experts": Size(("num_experts", "num_local_experts"), 60),
        "moe": Size(("moe_intermediate_size",), 1408),
        "shared": Size(("shared_expert_intermediate_size",), 5632),
        "step": Size(("decoder_sparse_step",), 1),
    },
    *attention("qkv_bias"),
    *gated("mlp", "ffn", "!sparse"),
    *experts("mlp", "mlp.gate"),
    *gated("mlp.shared_expert", "shared", "sparse"),
    Row(f"{LAYER}mlp.shared_expert_gate", "1 hidden", "sparse"),
    flags={"qkv_bias": Flag("qkv_bias", default=True)},
    predicates=STEPS,
)
QWEN3_MOE = decoder(
    {
        **sizes(151936, 2048, 6144, 24, 32, 4),
        "experts": Size(("num_experts", "num_local_experts"), 128),
        "moe": Size(("moe_intermediate_size",), 768),
        "step": Size(("decoder_sparse_step",), 1),
    },
    *HEAD_NORMS,
    *BIASED_ATTENTION,
    *gated("mlp", "ffn", "!sparse"),
    *experts("mlp", "mlp.gate"),
    flags=ATTENTION_BIAS,
    predicates=STEPS,
)
GPT_OSS = decoder(
    {
        **sizes(201088, 2880, 2880, 36, 64, 8, 64),
        "experts": Size(("num_local_experts", "num_experts"), 128),
    },
    Row(f"{LAYER}self_attn.sinks", "heads", tensor=True),
    *BIASED_ATTENTION,
    *experts("mlp", "mlp.router", width="ffn", where=""),
    *biased("always", Row(f"{LAYER}mlp.router", "experts hidden"))[1:],
    *(
        Row(f"{LAYER}mlp.experts.{{expert}}.{name}.bias", size, optional=True, tensor=True)
        for name, size in (("gate_proj", "ffn"), ("up_proj", "ffn"), ("down_proj", "hidden"))
    ),
    Row(f"{LAYER}mlp.experts.gate_up_proj_bias", "experts 2*ffn", optional=True, tensor=True),
    Row(f"{LAYER}mlp.experts.down_proj_bias", "experts hidden", optional=True, tensor=True),
    flags={"attention_bias": Flag("attention_bias", default=True), "always": Flag(default=True)},
    stacked=Stacked(inputs_first=True, interleaved=True),
)
LLAMA4 = decoder(
    {
        **sizes(202048, 5120, 8192, 48, 40, 8, 128),
        "dense": Size(("intermediate_size_mlp",), 16384),
        "experts": Size(("num_local_experts", "num_experts"), 16),
        "step": Size(("interleave_moe_layer_step",), 1),
    },
    *BIASED_ATTENTION,
    *gated("feed_forward", "dense", "!sparse"),
    *experts("feed_forward", "feed_forward.router", width="ffn"),
    *gated("feed_forward.shared_expert", "ffn", "sparse"),
    flags=ATTENTION_BIAS,
    predicates={"sparse": "i in moe_layers else (i + 1) % step == 0"},
    stacked=Stacked(inputs_first=True),
)


# Decoders with biases on all layers, and other names for the same parts.
MASK_TENSORS = {
    "attention.bias": "a causal mask, which is computed",
    "attention.masked_bias": "a constant of a mask, which is computed",
    "attn.bias": "a causal mask, which is computed",
    "attn.masked_bias": "a constant of a mask, which is computed",
}


PHI = Table(
    sizes(51200, 2048, 8192, 24, 32),
    (
        Row("model.embed_tokens", "vocab hidden"),
        *norms("model.final_layernorm", lead="", bias=True),
        *biased("always", Row("lm_head", "vocab hidden")),
        *norms("input_layernorm", bias=True),
        *attention("always", "always", "dense"),
        *biased("always", Row(f"{LAYER}mlp.fc1", "ffn hidden"), Row(f"{LAYER}mlp.fc2", "hidden ffn")),
        *(
            Row(
                f"{LAYER}self_attn.{name}_layernorm.{suffix}",
                "hidden/heads",
                when="qk_layernorm",
                tensor=True,
            )
            for name in ("q", "k")
            for suffix in ("weight", "bias")
        ),
    ),
    {**ALWAYS_BIASED, "qk_layernorm": Flag("qk_layernorm")},
    exempt=INV_FREQ,
)
STARCODER2 = Table(
    sizes(49152, 3072, 12288, 30, 24, 2),
    (
        Row("model.embed_tokens", "vocab hidden"),
        *norms("model.norm", lead="", bias=True),
        Row("lm_head", "vocab hidden"),
        *norms("input_layernorm", "post_attention_layernorm", bias=True),
        *attention("use_bias", "use_bias"),
        *biased("use_bias", Row(f"{LAYER}mlp.c_fc", "ffn hidden"), Row(f"{LAYER}mlp.c_proj", "hidden ffn")),
    ),
    {"use_bias": Flag("use_bias", default=True)},
    exempt=INV_FREQ,
    tied=True,
)

NEOX_LAYER = "gpt_neox.layers.{layer}."
GPT_NEOX = Table(
    sizes(50432, 6144, 24576, 44, 64),
    (
        Row("gpt_neox.embed_in", "vocab hidden"),
        *norms("gpt_neox.final_layer_norm", lead="", bias=True),
        Row("{embed_out|lm_head}", "vocab hidden"),
        *norms("input_layernorm", "post_attention_layernorm", lead=NEOX_LAYER, bias=True),
        *biased(
            "attention_bias",
            Row(f"{NEOX_LAYER}attention.query_key_value", "3*hidden hidden"),
            Row(f"{NEOX_LAYER}attention.dense", "hidden hidden"),
        ),
        *biased(
            "always",
            Row(f"{NEOX_LAYER}mlp.dense_h_to_4h", "ffn hidden"),
            Row(f"{NEOX_LAYER}mlp.dense_4h_to_h", "hidden ffn"),
        ),
    ),
    {**ALWAYS_BIASED, "attention_bias": Flag("attention_bias", default=True)},
    base="gpt_neox",
    exempt={**MASK_TENSORS, "attention.rotary_emb.inv_freq": INV_FREQ["rotary_emb.inv_freq"]},
    head="{embed_out|lm_head}",
    embedding="gpt_neox.embed_in",
)

BLOOM_LAYER = "transformer.h.{layer}."
BLOOM = Table(
    {
        "vocab": Size(("vocab_size",), 250880),
        "hidden": Size(("hidden_size", "n_embed"), 64),
        "layers": Size(("num_hidden_layers", "n_layer"), 2),
        "heads": Size(("num_attention_heads", "n_head"), 8),
    },
    (
        Row("transformer.word_embeddings", "vocab hidden"),
        *norms("transformer.word_embeddings_layernorm", lead="", bias=True),
        *norms("transformer.ln_f", lead="", bias=True),
        Row("lm_head", "vocab hidden"),
        *norms("input_layernorm", "post_attention_layernorm", lead=BLOOM_LAYER, bias=True),
        *biased(
            "always",
            Row(f"{BLOOM_LAYER}self_attention.query_key_value", "3*hidden hidden"),
            Row(f"{BLOOM_LAYER}self_attention.dense", "hidden hidden"),
            Row(f"{BLOOM_LAYER}mlp.dense_h_to_4h", "4*hidden hidden"),
            Row(f"{BLOOM_LAYER}mlp.dense_4h_to_h", "hidden 4*hidden"),
        ),
    ),
    ALWAYS_BIASED,
    base="transformer",
    embedding="transformer.word_embeddings",
    tied=True,
)


TABLES: Mapping[str, Table] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "phi3": PHI3,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
    "llama4_text": LLAMA4,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "phi": PHI,
    "starcoder2": STARCODER2,
    "gpt_neox": GPT_NEOX,
    "bloom": BLOOM,
}

# Activation between gate and up of an expert, and the use of the routing weight, by model type.
# Source: transformers 5.23, each family's modeling file.
Side = Literal["output", "input"]


@dataclass(frozen=True)
class Gating:
    """Config keys of the activation between gate and up, with transformers' defaults.

    A family with `alpha` and `limit`, each a key and a default, has gpt-oss's clamped SwiGLU, whatever
    `hidden_act` says. `weighted`: the side of the expert that the routing weight multiplies.
    """

    alpha: tuple[str, float] | None = None
    limit: tuple[str, float] | None = None
    weighted: Side = "output"


GATING: Mapping[str, Gating] = {
    "mixtral": Gating(),
    "qwen2_moe": Gating(),
    "qwen3_moe": Gating(),
    "deepseek_v2": Gating(),
    "deepseek_v3": Gating(),
    "deepseek_v32": Gating(),
    "glm4_moe": Gating(),
    "glm4_moe_lite": Gating(),
    "gpt_oss": Gating(alpha=("swiglu_alpha", 1.702), limit=("swiglu_limit", 7.0)),
    "llama4_text": Gating(weighted="input"),
}
