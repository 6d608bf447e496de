"""Logits of a drawn model with one layer by numpy, in float64, without an import of qload."""

from collections.abc import Sequence

import numpy as np

from tests.support.dialect_checkpoints import DENSE, EACH, HEAD, HEADS, PROJECTIONS, Case, Stored
from tests.support.dialect_layers import Values

EPSILON, BASE, TOP = 1e-5, 10000.0, 2


def logits_of(case: Case, stored: Stored, ids: Sequence[int]) -> Values | None:
    """Return the logits after the last token; None for a model type without an implementation."""
    if case.kind not in ("llama", "mixtral", "qwen3_moe"):
        return None
    values, above = stored.shown | stored.plain, "model.layers.0"

    def norm(name: str, x: Values) -> Values:
        weight = stored.tensors[f"{name}.weight"].double().numpy()
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight)

    x = values["model.embed_tokens"][list(ids)]
    x = x + _attention(case, values, norm, norm(f"{above}.input_layernorm", x))
    inner = norm(f"{above}.post_attention_layernorm", x)
    if case.form == DENSE:
        gate, up, down = (values[f"{above}.mlp.{name}"] for name in PROJECTIONS)
        x = x + _gated(inner, gate, up, down)
    else:
        router = values[f"{case.lead.removesuffix('.experts')}.gate"]
        x = x + np.stack([_routed(case, values, router, token) for token in inner])
    return np.asarray((norm("model.norm", x) @ values["lm_head"].T)[-1])


def _attention(case: Case, values: dict[str, Values], norm: object, x: Values) -> Values:
    lead = "model.layers.0.self_attn"
    q, k, v = ((x @ values[f"{lead}.{name}_proj"].T).reshape(len(x), HEADS, HEAD) for name in "qkv")
    if case.kind == "qwen3_moe":
        q, k = norm(f"{lead}.q_norm", q), norm(f"{lead}.k_norm", k)  # type: ignore[operator]
    angles = np.arange(len(x))[:, None] * BASE ** (-np.arange(HEAD // 2) * 2 / HEAD)
    cos, sin = (np.tile(part, 2)[:, None] for part in (np.cos(angles), np.sin(angles)))
    q, k = (
        one * cos + np.concatenate([-one[..., HEAD // 2 :], one[..., : HEAD // 2]], -1) * sin
        for one in (q, k)
    )
    scores = np.einsum("qhd,khd->hqk", q, k) / HEAD**0.5
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
    return np.asarray(out @ values[f"{lead}.o_proj"].T)


def _gated(x: Values, gate: Values, up: Values, down: Values) -> Values:
    gates = x @ gate.T
    return np.asarray((gates / (1 + np.exp(-gates)) * (x @ up.T)) @ down.T)


def _routed(case: Case, values: dict[str, Values], router: Values, x: Values) -> Values:
    """Apply the two experts with the highest router logits; their weights sum to 1."""
    scores = router @ x
    chosen = np.argsort(scores)[-TOP:]
    shares = np.exp(scores[chosen] - scores.max())
    names = case.names if case.form == EACH else PROJECTIONS
    outs = [_gated(x, *(values[f"{case.lead}.{e}.{name}"] for name in names)) for e in chosen]
    return np.asarray(sum(share * out for share, out in zip(shares / shares.sum(), outs, strict=True)))
