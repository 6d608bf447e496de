"""Decoders with experts. Which layers have any follows from the config, by transformers' own rules."""

from qload.architecture.table import Flag, Lists, Row, Size, Sizes, Stacked, Table
from qload.architecture.tables.dense import HEAD_NORMS
from qload.architecture.tables.parts import (
    ATTENTION_BIAS,
    INV_FREQ,
    LAYER,
    TWO,
    attention,
    biased,
    ends,
    experts,
    gated,
    sizes,
)


def every(lists: Lists, sizes: Sizes, layer: int) -> bool | None:
    """All layers have experts."""
    return True


def stepped(lists: Lists, sizes: Sizes, layer: int) -> bool | None:
    """Qwen: each layer that is a multiple of `decoder_sparse_step`, but for `mlp_only_layers`."""
    dense, step, experts = lists["mlp_only_layers"], sizes["step"], sizes["experts"]
    if dense is False or step is None or experts is None:
        return None
    return layer not in (dense or ()) and experts > 0 and step > 0 and (layer + 1) % step == 0


def interleaved(lists: Lists, sizes: Sizes, layer: int) -> bool | None:
    """Llama 4: those of `moe_layers`, or else the last of every `interleave_moe_layer_step`."""
    listed, step = lists["moe_layers"], sizes["step"]
    if listed is not None:
        return None if listed is False else layer in listed
    return None if step is None else step > 0 and (layer + 1) % step == 0


GATED = ("{w1|gate_proj}", "{w3|up_proj}", "{w2|down_proj}")  # Mixtral's own names, and two tools'

MIXTRAL = Table(
    {**sizes(32000, 4096, 14336, 32, 32, 8), "experts": Size(("num_local_experts", "num_experts"), 8)},
    (
        *ends(),
        *TWO,
        *attention(),
        *experts("{block_sparse_moe|mlp}", "{block_sparse_moe|mlp}.gate", GATED, "ffn"),
    ),
    sparse=every,
    exempt=INV_FREQ,
)
QWEN2_MOE = Table(
    {
        **sizes(151936, 2048, 5632, 24, 16, 16),
        "experts": Size(("num_experts", "num_local_experts"), 60),
        "moe": Size(("moe_intermediate_size",), 1408),
        "shared": Size(("shared_expert_intermediate_size",), 5632),
        "step": Size(("decoder_sparse_step",), 1),
    },
    (
        *ends(),
        *TWO,
        *attention("qkv_bias"),
        *gated("mlp", "ffn", "dense"),
        *experts("mlp", "mlp.gate"),
        *gated("mlp.shared_expert", "shared", "sparse"),
        Row(f"{LAYER}mlp.shared_expert_gate", "1 hidden", "sparse"),
    ),
    {"qkv_bias": Flag("qkv_bias", default=True)},
    sparse=stepped,
    exempt=INV_FREQ,
)
QWEN3_MOE = Table(
    {
        **sizes(151936, 2048, 6144, 24, 32, 4),
        "experts": Size(("num_experts", "num_local_experts"), 128),
        "moe": Size(("moe_intermediate_size",), 768),
        "step": Size(("decoder_sparse_step",), 1),
    },
    (
        *ends(),
        *TWO,
        *HEAD_NORMS,
        *attention("attention_bias", "attention_bias"),
        *gated("mlp", "ffn", "dense"),
        *experts("mlp", "mlp.gate"),
    ),
    ATTENTION_BIAS,
    sparse=stepped,
    exempt=INV_FREQ,
)
GPT_OSS = Table(
    {
        **sizes(201088, 2880, 2880, 36, 64, 8, 64),
        "experts": Size(("num_local_experts", "num_experts"), 128),
    },
    (
        *ends(),
        *TWO,
        Row(f"{LAYER}self_attn.sinks", "heads", tensor=True),
        *attention("attention_bias", "attention_bias"),
        *experts("mlp", "mlp.router", width="ffn"),
        *biased("always", Row(f"{LAYER}mlp.router", "experts hidden", "sparse"))[1:],
        *(
            Row(f"{LAYER}mlp.experts.{{expert}}.{name}.bias", size, "sparse", optional=True, tensor=True)
            for name, size in (("gate_proj", "ffn"), ("up_proj", "ffn"), ("down_proj", "hidden"))
        ),
        Row(f"{LAYER}mlp.experts.gate_up_proj_bias", "experts 2*ffn", "sparse", optional=True, tensor=True),
        Row(f"{LAYER}mlp.experts.down_proj_bias", "experts hidden", "sparse", optional=True, tensor=True),
    ),
    {"attention_bias": Flag("attention_bias", default=True), "always": Flag(default=True)},
    sparse=every,
    exempt=INV_FREQ,
    stacked=Stacked(inputs_first=True, interleaved=True),
)
LLAMA4 = Table(
    {
        **sizes(202048, 5120, 8192, 48, 40, 8, 128),
        "dense": Size(("intermediate_size_mlp",), 16384),
        "experts": Size(("num_local_experts", "num_experts"), 16),
        "step": Size(("interleave_moe_layer_step",), 1),
    },
    (
        *ends(),
        *TWO,
        *attention("attention_bias", "attention_bias"),
        *gated("feed_forward", "dense", "dense"),
        *experts("feed_forward", "feed_forward.router", width="ffn"),
        *gated("feed_forward.shared_expert", "ffn", "sparse"),
    ),
    ATTENTION_BIAS,
    sparse=interleaved,
    exempt=INV_FREQ,
    stacked=Stacked(inputs_first=True),
)
