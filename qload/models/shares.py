"""How ranks share a whole model, and whether they can, before any of its weights is read."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from qload.experts import ExpertSplit
from qload.experts.load import plan_experts
from qload.loader import Heads, Part, Split, split_blocks
from qload.methods.loaded import planned
from qload.models.config import TextConfig
from qload.models.names import first_stored, is_stored
from qload.weights import Weights

QUERIES, KEYS, FUSED = ("q_proj", "q_b_proj", "kv_b_proj"), ("k_proj", "v_proj"), "qkv_proj"
OUTPUTS, BOTH, INPUTS = ("gate_proj", "up_proj"), "gate_up_proj", ("o_proj", "down_proj")
SHARED = ("shared_expert", "shared_experts")
EXPERTS = ("experts", "switch_mlp")


@dataclass(frozen=True)
class SharedMatrix:
    """How ranks share one stored matrix, however many they are.

    Attributes
    ----------
    prefix
        What it is stored under.
    split
        What it is cut along; None: every rank has all of it.
    heads
        Of attention, of which each rank gets whole ones; only along "N".
    blocks
        Of how many equal blocks a rank gets its share of each: 2 of gate and up in one.
    short
        Whether the last share may be short, as that of a vocabulary.
    """

    prefix: str
    split: Split | None
    heads: Heads | None = None
    blocks: int = 1
    short: bool = False

    def parts(self, N: int, ranks: int) -> list[Part]:
        """The parts of a load of this matrix of `N` outputs for so many `ranks`; DivideError."""
        if self.heads is not None:
            return self.heads.parts([(self.prefix, N)], ranks)
        if self.blocks == 1:
            return [Part(self.prefix, short=self.short)]
        edges = [0, *accumulate(split_blocks(self.prefix, "N", N, self.blocks))]
        return [Part(self.prefix, *span) for span in pairwise(edges)]


def check_shares(
    weights: Weights, config: TextConfig, base: str, head: str, split: ExpertSplit | None
) -> None:
    """CutError or DivideError, on every rank alike, where a layer cannot be cut for the ranks of `weights`.

    Of headers and facts alone, for each decoder layer under `base`, the embedding and the `head`. What is
    quantized or repacked while it is loaded is refused by its own load.
    """
    ranks = weights.process_group.size()
    if ranks == 1:
        return
    for layer in range(config.layers):
        for matrix in layer_matrices(weights, config, base, layer):
            _check(weights, matrix, ranks)
        if config.sparse(layer):
            plan_experts(weights, experts_of(weights, config, base, layer), split)
    for matrix in end_matrices(weights, base, head):
        _check(weights, matrix, ranks)


def layer_matrices(weights: Weights, config: TextConfig, base: str, layer: int) -> Iterator[SharedMatrix]:
    """The matrices of decoder layer number `layer` under `base` that ranks cut, but for those of experts."""
    prefix = f"{base}.layers.{layer}"
    feed_forward = first_stored(weights, prefix, config.family.feed_forward)
    shared = (f"{feed_forward}.{name}" for name in SHARED)
    for parent in (f"{prefix}.self_attn", feed_forward, *shared):
        yield from _parts(weights, parent, config)


def end_matrices(weights: Weights, base: str, head: str) -> Iterator[SharedMatrix]:
    """The embedding, and the `head` where one is stored: vocabularies, whose last share may be short."""
    yield SharedMatrix(f"{base}.embed_tokens", "N", short=True)
    if is_stored(weights, head):
        yield SharedMatrix(head, "N", short=True)


def experts_of(weights: Weights, config: TextConfig, base: str, layer: int) -> str:
    """What the names of the experts of decoder layer number `layer` under `base` begin with."""
    feed_forward = first_stored(weights, f"{base}.layers.{layer}", config.family.feed_forward)
    return first_stored(weights, feed_forward, EXPERTS)


def _check(weights: Weights, matrix: SharedMatrix, ranks: int) -> None:
    """The errors of a load of a matrix."""
    N, _ = weights.loader.shape(weights, matrix.prefix)
    planned(weights, matrix.parts(N, ranks), matrix.split)


def _parts(weights: Weights, parent: str, config: TextConfig) -> Iterator[SharedMatrix]:
    """Each matrix that is stored under `parent` as its load has it, and along what it is cut."""
    heads = {
        **dict.fromkeys(QUERIES, Heads(config.heads)),
        **dict.fromkeys(KEYS, Heads(keys=config.kv_heads)),
        FUSED: Heads(config.heads, config.kv_heads),
    }
    for name in (*heads, *OUTPUTS, BOTH, *INPUTS):
        prefix = f"{parent}.{name}"
        if is_stored(weights, prefix):
            split: Split = "K" if name in INPUTS else "N"
            yield SharedMatrix(prefix, split, heads.get(name), blocks=2 if name == BOTH else 1)
