"""What a family of models does between gate and up of an expert, and with the routing weight: data.

Beside the tables, by the same `model_type`. Source: transformers 5.23, each family's modeling file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Side = Literal["output", "input"]


@dataclass(frozen=True, slots=True)
class Gating:
    """Where a config says what stands between gate and up, with transformers' defaults.

    `key`, `default`: what names the activation; a family with `alpha` and `limit`, each a key and a default,
    has gpt-oss's clamped SwiGLU, whatever the key says. `weighted`: what the routing weight multiplies.
    """

    key: str = "hidden_act"
    default: str = "silu"
    alpha: tuple[str, float] | None = None
    limit: tuple[str, float] | None = None
    weighted: Side = "output"


GATING: Mapping[str, Gating] = {
    "mixtral": Gating(),
    "qwen2_moe": Gating(),
    "qwen3_moe": Gating(),
    "deepseek_v2": Gating(),
    "deepseek_v3": Gating(),
    "gpt_oss": Gating(alpha=("swiglu_alpha", 1.702), limit=("swiglu_limit", 7.0)),
    "llama4_text": Gating(weighted="input"),
}
