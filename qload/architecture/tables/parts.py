"""What the tables of several types share: sizes, attention, feed-forward layers, experts."""

from collections.abc import Mapping

from qload.architecture.table import Flag, Row, Size, Where

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
    """The sizes of a decoder, with their defaults."""
    each = "hidden/heads"
    return {
        "vocab": Size(("vocab_size",), vocab),
        "hidden": Size(("hidden_size",), hidden),
        "ffn": Size(("intermediate_size",), ffn),
        "layers": Size(("num_hidden_layers",), layers),
        "heads": Size(("num_attention_heads",), heads),
        "kv": Size(("num_key_value_heads",), kv, "heads"),
        "head": Size(("head_dim",), head or each, each),
    }


def ends(head: str = "lm_head") -> tuple[Row, ...]:
    """Embedding, last norm and head."""
    return (
        Row("model.embed_tokens", "vocab hidden"),
        Row("model.norm.weight", "hidden", tensor=True),
        Row(head, "vocab hidden"),
    )


def norms(*names: str, bias: bool = False) -> tuple[Row, ...]:
    """The norms of each layer over the hidden size."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(Row(f"{LAYER}{name}.{kind}", "hidden", tensor=True) for name in names for kind in kinds)


TWO = norms("input_layernorm", "post_attention_layernorm")


def biased(when: str, *rows: Row) -> tuple[Row, ...]:
    """Matrices, each with the bias that a flag of the config promises."""
    return tuple(
        each
        for row in rows
        for each in (
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
    """Queries, keys, values and the output; queries, keys and values are stored fused by engines."""
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


def gated(lead: str, width: str, where: Where = "", when: str = "", bias: str = "") -> tuple[Row, ...]:
    """Gate, up and down of a feed-forward layer; gate and up are stored fused by engines."""
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
) -> tuple[Row, ...]:
    """The router and each expert's gate, up and down, which some programs stack into one tensor."""
    gate, up, down = names
    each, stack = f"{LAYER}{lead}.experts.", f"{LAYER}{lead}.{{experts|switch_mlp}}."
    both = (f"{stack}gate_up_proj",)
    return (
        Row(f"{LAYER}{router}", "experts hidden", "sparse"),
        Row(f"{each}{{expert}}.{gate}", f"{width} hidden", "sparse", within=(*both, f"{stack}gate_proj")),
        Row(f"{each}{{expert}}.{up}", f"{width} hidden", "sparse", within=(*both, f"{stack}up_proj")),
        Row(f"{each}{{expert}}.{down}", f"hidden {width}", "sparse", within=(f"{stack}down_proj",)),
        Row(f"{stack}gate_up_proj", f"2*{width} hidden", "sparse", optional=True),
        Row(f"{stack}{{gate_proj|up_proj}}", f"{width} hidden", "sparse", optional=True),
        Row(f"{stack}down_proj", f"hidden {width}", "sparse", optional=True),
    )


ATTENTION_BIAS = {"attention_bias": Flag("attention_bias")}
