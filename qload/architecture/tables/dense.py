"""Llama and the decoders that follow it: attention, a gated feed-forward layer, two to four norms."""

from dataclasses import replace

from qload.architecture.table import Flag, Row, Table
from qload.architecture.tables.parts import (
    ATTENTION_BIAS,
    INV_FREQ,
    LAYER,
    TWO,
    attention,
    ends,
    gated,
    norms,
    sizes,
)

FOUR = (*TWO, *norms("pre_feedforward_layernorm", "post_feedforward_layernorm"))
HEAD_NORMS = tuple(
    Row(f"{LAYER}self_attn.{name}.weight", "head", tensor=True) for name in ("q_norm", "k_norm")
)

LLAMA = Table(
    sizes(32000, 4096, 11008, 32, 32),
    (
        *ends(),
        *TWO,
        *attention("attention_bias", "attention_bias"),
        *gated("mlp", "ffn", bias="mlp_bias"),
    ),
    {**ATTENTION_BIAS, "mlp_bias": Flag("mlp_bias")},
    exempt=INV_FREQ,
)
MISTRAL = Table(
    sizes(32000, 4096, 14336, 32, 32, 8),
    (*ends(), *TWO, *attention(), *gated("mlp", "ffn")),
    exempt=INV_FREQ,
)
QWEN2 = Table(
    sizes(151936, 4096, 22016, 32, 32, 32),
    (*ends(), *TWO, *attention("always"), *gated("mlp", "ffn")),
    {"always": Flag(default=True)},
    exempt=INV_FREQ,
)
QWEN3 = Table(
    sizes(151936, 4096, 22016, 32, 32, 32, 128),
    (*ends(), *TWO, *HEAD_NORMS, *attention("attention_bias", "attention_bias"), *gated("mlp", "ffn")),
    ATTENTION_BIAS,
    exempt=INV_FREQ,
)
GEMMA = Table(
    sizes(256000, 3072, 24576, 28, 16, 16, 256),
    (*ends(), *TWO, *attention("attention_bias", "attention_bias"), *gated("mlp", "ffn")),
    ATTENTION_BIAS,
    exempt=INV_FREQ,
    tied=True,
)
GEMMA2 = replace(
    GEMMA,
    sizes=sizes(256000, 2304, 9216, 26, 8, 4, 256),
    rows=(*ends(), *FOUR, *attention("attention_bias", "attention_bias"), *gated("mlp", "ffn")),
)
GEMMA3 = replace(GEMMA2, sizes=sizes(262208, 2304, 9216, 26, 8, 4, 256), rows=(*GEMMA2.rows, *HEAD_NORMS))
PHI3 = Table(
    sizes(32064, 3072, 8192, 32, 32),
    (*ends(), *TWO, *attention(), *gated("mlp", "ffn")),
    exempt=INV_FREQ,
)
