"""What each type of model does between its matrices: one row of data for each `model_type`.

Names and sizes of tensors are in `qload.architecture`; here is what no tensor tells. Keys and defaults are
those of transformers 5.23.0, each family's configuration and modeling file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Windows = Literal["none", "every", "switched", "typed", "alternating", "chunked"]
HeadNorm = Literal["none", "before rope", "after rope"]


@dataclass(frozen=True, slots=True)
class Family:
    """One type of model.

    Attributes
    ----------
    defaults
        What a config means that leaves these keys out.
    theta
        `rope_theta` where the config says none.
    rope
        The rope parameters of a config that has none at all.
    windows
        Which layers see a window of tokens alone. "none"; "every": all, where `sliding_window` is said;
        "switched": all, where `use_sliding_window` is set too; "typed": where that is set, those that
        `layer_types` names, or those from `max_window_layers` on; "alternating": those that `layer_types`
        names, or every other one from the first on; "chunked": as Llama 4, chunks on layers with rope.
    pairs
        Whether rope turns neighbours (2 j, 2 j + 1), and not (j, j + D / 2).
    head_norm
        Where each head of queries and keys is normalized: with a weight before rope, or without after it.
    sinks
        Whether each head has a sink: one more column of its softmax, which is dropped.
    feed_forward, router, shared
        The names of a layer's feed-forward part, of the router in it, and of the expert of all tokens.
    """

    defaults: Mapping[str, Any]
    theta: float = 10000.0
    rope: Mapping[str, Any] = field(default_factory=dict)
    windows: Windows = "none"
    pairs: bool = False
    head_norm: HeadNorm = "none"
    sinks: bool = False
    feed_forward: tuple[str, ...] = ("mlp",)
    router: str = "gate"
    shared: str = ""


def _defaults(eps: float, positions: int, eos: int | None = 2, **more: Any) -> Mapping[str, Any]:
    return {"rms_norm_eps": eps, "max_position_embeddings": positions, "eos_token_id": eos, **more}


FAMILIES: Mapping[str, Family] = {
    "llama": Family(_defaults(1e-6, 2048)),
    "mistral": Family(_defaults(1e-6, 131072, sliding_window=4096), windows="every"),
    "qwen2": Family(_defaults(1e-6, 32768, None), windows="typed"),
    "qwen3": Family(_defaults(1e-6, 32768, None), windows="typed", head_norm="before rope"),
    "mixtral": Family(
        _defaults(1e-5, 131072, sliding_window=None),
        theta=1e6,
        windows="every",
        feed_forward=("block_sparse_moe", "mlp"),
    ),
    "qwen3_moe": Family(_defaults(1e-6, 32768, None), windows="switched", head_norm="before rope"),
    "gpt_oss": Family(
        _defaults(1e-5, 131072, None, sliding_window=128),
        theta=150000.0,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        windows="alternating",
        sinks=True,
        router="router",
    ),
    "llama4_text": Family(
        _defaults(1e-5, 131072),
        theta=500000.0,
        windows="chunked",
        pairs=True,
        head_norm="after rope",
        feed_forward=("feed_forward",),
        router="router",
        shared="shared_expert",
    ),
    "deepseek_v2": Family(_defaults(1e-6, 2048), pairs=True, shared="shared_experts"),
    "deepseek_v3": Family(_defaults(1e-6, 4096, 1), pairs=True, shared="shared_experts"),
}
