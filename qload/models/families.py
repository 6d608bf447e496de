"""Properties of each supported model type, beyond names and sizes of tensors: one row per `model_type`.

Names and sizes of tensors are in `qload.architecture`. Keys and defaults are those of transformers 5.23.0,
from the configuration and modeling file of each model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Windows = Literal["none", "every", "switched", "typed", "alternating", "chunked"]
HeadNorm = Literal["none", "before rope", "after rope"]


@dataclass(frozen=True)
class Family:
    """Properties of one model type.

    Attributes
    ----------
    defaults
        Default values of config keys.
    theta
        Default of `rope_theta`.
    rope
        Rope parameters of a config without any.
    rotary_share
        Default of `partial_rotary_factor`, the rotated share of a head; None: heads are rotated whole.
    windows
        Layers with sliding-window attention. "none"; "every": all, if `sliding_window` is set; "switched":
        all, if `use_sliding_window` is set too; "typed": if that is set, the layers that `layer_types` names,
        or the layers from `max_window_layers` on; "alternating": the layers that `layer_types` names, or
        every second one from the first on; "chunked": Llama 4, chunks on layers with rope.
    pairs
        Whether rope rotates neighbours (2 j, 2 j + 1) instead of (j, j + D / 2).
    head_norm
        Norm of each head of queries and keys: before rope with a weight, or after rope without one.
    sinks
        Whether each head has an attention sink: one more softmax column, which is dropped.
    indexed
        Whether an indexer chooses the keys that a token attends to.
    feed_forward, router, shared
        Names of a layer's feed-forward part, of its router, and of its shared expert.
    """

    defaults: Mapping[str, Any]
    theta: float = 10000.0
    rope: Mapping[str, Any] = field(default_factory=dict)
    rotary_share: float | None = None
    windows: Windows = "none"
    pairs: bool = False
    head_norm: HeadNorm = "none"
    sinks: bool = False
    indexed: bool = False
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
    "deepseek_v32": Family(_defaults(1e-6, 163840, 1), pairs=True, indexed=True, shared="shared_experts"),
    "glm4_moe": Family(
        _defaults(1e-5, 131072, None, use_qk_norm=False),
        rotary_share=0.5,
        head_norm="before rope",
        shared="shared_experts",
    ),
    "glm4_moe_lite": Family(
        _defaults(1e-5, 202752, 1, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256),
        pairs=True,
        shared="shared_experts",
    ),
}
