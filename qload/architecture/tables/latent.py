"""DeepSeek V2 and V3: keys and values from a latent vector, shared experts, dense layers first."""

from collections.abc import Mapping

from qload.architecture.table import Flag, Lists, Row, Size, Sizes, Table
from qload.architecture.tables.parts import (
    ATTENTION_BIAS,
    INV_FREQ,
    LAYER,
    TWO,
    biased,
    ends,
    experts,
    gated,
    sizes,
)

ATTENTION = f"{LAYER}self_attn."


def after_dense(lists: Lists, sizes: Sizes, layer: int) -> bool | None:
    """All layers from `first_k_dense_replace` on, where there are routed experts."""
    first, count = sizes["first"], sizes["experts"]
    return None if first is None or count is None else layer >= first and count > 0


def latent(**defaults: int) -> Mapping[str, Size]:
    """The sizes that there are beside, with defaults; `q_lora_rank` of null: queries are not compressed."""
    keys = {
        "q_lora": "q_lora_rank",
        "kv_lora": "kv_lora_rank",
        "nope": "qk_nope_head_dim",
        "rope": "qk_rope_head_dim",
        "value": "v_head_dim",
        "moe": "moe_intermediate_size",
        "experts": "n_routed_experts",
        "shared": "n_shared_experts",
        "first": "first_k_dense_replace",
        "predict": "num_nextn_predict_layers",
    }
    spellings = {"experts": ("num_local_experts", "num_experts")}
    return {
        name: Size((key, *spellings.get(name, ())), defaults.get(name), 0 if name == "q_lora" else None)
        for name, key in keys.items()
    }


def attended(decoder: Mapping[str, Size]) -> Mapping[str, Size]:
    """The sizes of a decoder whose heads are not those of keys, and not of one size."""
    return {name: size for name, size in decoder.items() if name not in ("kv", "head")}


ROWS = (
    *ends(),
    *TWO,
    *biased("attention_bias", Row(f"{ATTENTION}q_a_proj", "q_lora hidden", when="compressed")),
    Row(f"{ATTENTION}q_a_layernorm.weight", "q_lora", when="compressed", tensor=True),
    Row(f"{ATTENTION}q_b_proj", "heads*nope+heads*rope q_lora", when="compressed"),
    Row(f"{ATTENTION}q_proj", "heads*nope+heads*rope hidden", when="!compressed"),
    *biased("attention_bias", Row(f"{ATTENTION}kv_a_proj_with_mqa", "kv_lora+rope hidden")),
    Row(f"{ATTENTION}kv_a_layernorm.weight", "kv_lora", tensor=True),
    Row(f"{ATTENTION}kv_b_proj", "heads*nope+heads*value kv_lora"),
    *biased("attention_bias", Row(f"{ATTENTION}o_proj", "hidden heads*value")),
    *gated("mlp", "ffn", "dense"),
    *experts("mlp", "mlp.gate"),
    *gated("mlp.shared_experts", "shared*moe", "sparse", "shared"),
)
FLAGS = {**ATTENTION_BIAS, "compressed": Flag(size="q_lora"), "shared": Flag(size="shared")}

DEEPSEEK_V2 = Table(
    {
        **attended(sizes(102400, 4096, 11008, 32, 32)),
        **latent(
            q_lora=1536,
            kv_lora=512,
            nope=128,
            rope=64,
            value=128,
            moe=1407,
            experts=64,
            shared=2,
            first=0,
            predict=0,
        ),
    },
    ROWS,
    FLAGS,
    sparse=after_dense,
    exempt=INV_FREQ,
)
DEEPSEEK_V3 = Table(
    {
        **attended(sizes(129280, 7168, 18432, 61, 128)),
        **latent(
            q_lora=1536,
            kv_lora=512,
            nope=128,
            rope=64,
            value=128,
            moe=2048,
            experts=256,
            shared=1,
            first=3,
            predict=1,
        ),
    },
    (*ROWS, Row(f"{LAYER}mlp.gate.e_score_correction_bias", "experts", "sparse", tensor=True)),
    FLAGS,
    sparse=after_dense,
    exempt=INV_FREQ,
)
