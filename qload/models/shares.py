"""Whether ranks can share a whole model, before any of its weights is read."""

from collections.abc import Iterator

from qload.experts import ExpertSplit
from qload.experts.load import plan_experts
from qload.loader import Heads, Part, Split
from qload.models.config import TextConfig
from qload.models.names import first_stored, is_stored
from qload.weights import Weights

QUERIES, KEYS = ("q_proj", "q_b_proj", "kv_b_proj"), ("k_proj", "v_proj")
OUTPUTS, INPUTS = ("gate_proj", "up_proj"), ("o_proj", "down_proj")
SHARED = ("shared_expert", "shared_experts")


def check_shares(weights: Weights, config: TextConfig, base: str, split: ExpertSplit | None) -> None:
    """CutError or DivideError, on every rank alike, where a layer cannot be cut for the ranks of `weights`.

    Of headers and facts alone, for each decoder layer under `base`. What is stored fused, or quantized or
    repacked while it is loaded, is refused by its own load.
    """
    if weights.process_group.size() == 1:
        return
    for layer in range(config.layers):
        prefix = f"{base}.layers.{layer}"
        feed_forward = first_stored(weights, prefix, config.family.feed_forward)
        shared = (f"{feed_forward}.{name}" for name in SHARED)
        for parent in (f"{prefix}.self_attn", feed_forward, *shared):
            for part, dim in _parts(weights, parent, config):
                weights.loader.plan(weights, [part], dim)
        if config.sparse(layer):
            plan_experts(weights, first_stored(weights, feed_forward, ("experts", "switch_mlp")), split)


def _parts(weights: Weights, parent: str, config: TextConfig) -> Iterator[tuple[Part, Split]]:
    """Each matrix that is stored under `parent` as its load has it, and along what it is cut."""
    ranks = weights.process_group.size()
    heads = {
        **dict.fromkeys(QUERIES, Heads(config.heads)),
        **dict.fromkeys(KEYS, Heads(keys=config.kv_heads)),
    }
    for name in (*heads, *OUTPUTS, *INPUTS):
        prefix = f"{parent}.{name}"
        if not is_stored(weights, prefix):
            continue
        if name in heads:
            (part,) = heads[name].parts([(prefix, weights.loader.shape(weights, prefix)[0])], ranks)
            yield part, "N"
        else:
            yield Part(prefix), "K" if name in INPUTS else "N"
