"""Decoders with biases everywhere, and other names for the same parts."""

from qload.architecture.table import Flag, Row, Size, Table
from qload.architecture.tables.parts import INV_FREQ, LAYER, attention, biased, norms, sizes

ALWAYS = {"always": Flag(default=True)}
MASKS = {
    "attention.bias": "a causal mask, which is computed",
    "attention.masked_bias": "a constant of a mask, which is computed",
    "attn.bias": "a causal mask, which is computed",
    "attn.masked_bias": "a constant of a mask, which is computed",
}


def norm(name: str) -> tuple[Row, ...]:
    """A norm with a bias."""
    return tuple(Row(f"{name}.{kind}", "hidden", tensor=True) for kind in ("weight", "bias"))


PHI = Table(
    sizes(51200, 2048, 8192, 24, 32),
    (
        Row("model.embed_tokens", "vocab hidden"),
        *norm("model.final_layernorm"),
        *biased("always", Row("lm_head", "vocab hidden")),
        *norms("input_layernorm", bias=True),
        *attention("always", "always", "dense"),
        *biased("always", Row(f"{LAYER}mlp.fc1", "ffn hidden"), Row(f"{LAYER}mlp.fc2", "hidden ffn")),
        *(
            Row(f"{LAYER}self_attn.{name}_layernorm.{kind}", "hidden/heads", when="qk_layernorm", tensor=True)
            for name in ("q", "k")
            for kind in ("weight", "bias")
        ),
    ),
    {**ALWAYS, "qk_layernorm": Flag("qk_layernorm")},
    exempt=INV_FREQ,
)
STARCODER2 = Table(
    sizes(49152, 3072, 12288, 30, 24, 2),
    (
        Row("model.embed_tokens", "vocab hidden"),
        *norm("model.norm"),
        Row("lm_head", "vocab hidden"),
        *norms("input_layernorm", "post_attention_layernorm", bias=True),
        *attention("use_bias", "use_bias"),
        *biased("use_bias", Row(f"{LAYER}mlp.c_fc", "ffn hidden"), Row(f"{LAYER}mlp.c_proj", "hidden ffn")),
    ),
    {"use_bias": Flag("use_bias", default=True)},
    exempt=INV_FREQ,
    tied=True,
)

NEOX = "gpt_neox.layers.{layer}."
GPT_NEOX = Table(
    sizes(50432, 6144, 24576, 44, 64),
    (
        Row("gpt_neox.embed_in", "vocab hidden"),
        *norm("gpt_neox.final_layer_norm"),
        Row("{embed_out|lm_head}", "vocab hidden"),
        *(row for name in ("input_layernorm", "post_attention_layernorm") for row in norm(f"{NEOX}{name}")),
        *biased(
            "attention_bias",
            Row(f"{NEOX}attention.query_key_value", "3*hidden hidden"),
            Row(f"{NEOX}attention.dense", "hidden hidden"),
        ),
        *biased(
            "always",
            Row(f"{NEOX}mlp.dense_h_to_4h", "ffn hidden"),
            Row(f"{NEOX}mlp.dense_4h_to_h", "hidden ffn"),
        ),
    ),
    {**ALWAYS, "attention_bias": Flag("attention_bias", default=True)},
    base="gpt_neox",
    exempt={**MASKS, "attention.rotary_emb.inv_freq": INV_FREQ["rotary_emb.inv_freq"]},
    head="{embed_out|lm_head}",
    embedding="gpt_neox.embed_in",
)

BLOCK = "transformer.h.{layer}."
BLOOM = Table(
    {
        "vocab": Size(("vocab_size",), 250880),
        "hidden": Size(("hidden_size", "n_embed"), 64),
        "layers": Size(("num_hidden_layers", "n_layer"), 2),
        "heads": Size(("num_attention_heads", "n_head"), 8),
    },
    (
        Row("transformer.word_embeddings", "vocab hidden"),
        *norm("transformer.word_embeddings_layernorm"),
        *norm("transformer.ln_f"),
        Row("lm_head", "vocab hidden"),
        *(row for name in ("input_layernorm", "post_attention_layernorm") for row in norm(f"{BLOCK}{name}")),
        *biased(
            "always",
            Row(f"{BLOCK}self_attention.query_key_value", "3*hidden hidden"),
            Row(f"{BLOCK}self_attention.dense", "hidden hidden"),
            Row(f"{BLOCK}mlp.dense_h_to_4h", "4*hidden hidden"),
            Row(f"{BLOCK}mlp.dense_4h_to_h", "hidden 4*hidden"),
        ),
    ),
    ALWAYS,
    base="transformer",
    embedding="transformer.word_embeddings",
    tied=True,
)
