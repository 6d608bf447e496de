"""What the parts of a layer are stored as, where programs differ: told by what there is, never guessed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from qload.errors import MissingTensorError, ShapeError
from qload.experts import ExpertSplit
from qload.experts.load import plan_experts
from qload.loader import Heads, Part, Split, split_blocks
from qload.methods.loaded import planned
from qload.models.config import TextConfig
from qload.weights import Weights

# What the names of a text model begin with, alone or within another.
TEXTS = ("model", "model.text_model", "model.language_model", "language_model.model")


def is_stored(weights: Weights, prefix: str) -> bool:
    """Whether any tensor is stored under `prefix`, or under it within the prefix of `weights`."""
    leads = ("", *([f"{weights.prefix}."] if weights.prefix else ()))
    return any(weights.names_under(f"{lead}{prefix}.") for lead in leads)


def first_stored(weights: Weights, parent: str, names: Sequence[str]) -> str:
    """The prefix of the first of `names` under `parent` that is stored; that of the first where none is."""
    found = (f"{parent}.{name}" for name in names if is_stored(weights, f"{parent}.{name}"))
    return next(found, f"{parent}.{names[0]}")


def stored_parts(weights: Weights, parent: str, parts: Sequence[str], fused: str) -> list[str] | str:
    """The prefixes of the `parts` of a layer, or the one that they are stored fused under."""
    if is_stored(weights, f"{parent}.{fused}") and not is_stored(weights, f"{parent}.{parts[0]}"):
        return f"{parent}.{fused}"
    return [f"{parent}.{part}" for part in parts]


def text_within(weights: Weights) -> tuple[str, str]:
    """What the names of a text model begin with, and the name of its head: of the first that is stored.

    A text model alone, or that of one that sees or hears too: by Idefics2's names, by those that transformers
    5 gives them, and by those of before.
    """
    found = (base for base in TEXTS if is_stored(weights, f"{base}.embed_tokens"))
    base = next(found, TEXTS[0])
    return base, base.removesuffix("model") + "lm_head" if base.startswith("language") else "lm_head"


def check_matrix(
    weights: Weights,
    prefixes: Sequence[str] | str,
    sizes: Sequence[int],
    features: int,
    *,
    padded: bool = False,
) -> None:
    """ShapeError where a layer is not (N, K) of the config.

    `prefixes`: one for each of `sizes`, which are N, or one name that holds all of them. `features`: K.
    `padded`: whether it may have more outputs than the config says, as padded vocabularies have.
    """
    fused = isinstance(prefixes, str)
    named = [(prefixes, sum(sizes))] if isinstance(prefixes, str) else list(zip(prefixes, sizes, strict=True))
    for prefix, size in named:
        shape = weights.loader.shape(weights, prefix)
        right = shape == (size, features) or (padded and shape[0] >= size and shape[1] == features)
        if not right:
            parts = f" = {' + '.join(map(str, sizes))}" if fused and len(sizes) > 1 else ""
            more = " or more" if padded else ""
            raise ShapeError(prefix, f"({size}{more}, {features}), as the config says{parts}", shape)


def check_biases(weights: Weights, prefixes: Sequence[str] | str, promised: frozenset[str]) -> None:
    """MissingTensorError where the config promises a bias that is not stored."""
    for prefix in [prefixes] if isinstance(prefixes, str) else prefixes:
        name = f"{prefix}.bias"
        if prefix.rpartition(".")[2] in promised and not weights.has_tensor(name):
            error: MissingTensorError = weights.missing(name, "the config says that there is one")
            raise error


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
