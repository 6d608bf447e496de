"""Layers of a text model as a checkpoint stores them: names, shapes, and their split over ranks.

All checks are made from headers, before any weight is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from qload.errors import ShapeError
from qload.experts import ExpertSplit
from qload.experts.load import plan_experts
from qload.loader import Heads, Part, Split, split_blocks
from qload.methods.checkpoint_linear import LinearFactory, plan_linear
from qload.methods.layers import ExpertsFactory
from qload.models.config import TextConfig
from qload.weights import Weights

# Prefixes of a text model: alone; in Idefics2; in transformers 5's multimodal models, and in earlier ones.
TEXT_PREFIXES = ("model", "model.text_model", "model.language_model", "language_model.model")
QUERIES, KEYS, FUSED_QKV = ("q_proj", "q_b_proj", "kv_b_proj"), ("k_proj", "v_proj"), "qkv_proj"
GATE_AND_UP, FUSED_GATE_UP, ROW_PARALLEL = ("gate_proj", "up_proj"), "gate_up_proj", ("o_proj", "down_proj")
SHARED_EXPERTS = ("shared_expert", "shared_experts")
EXPERTS = ("experts", "switch_mlp")


def is_stored(weights: Weights, prefix: str) -> bool:
    """Return whether any tensor is stored under `prefix`, alone or within the prefix of `weights`."""
    scopes = ("", *([f"{weights.prefix}."] if weights.prefix else ()))
    return any(weights.names_under(f"{scope}{prefix}.") for scope in scopes)


def first_stored(weights: Weights, parent: str, names: Sequence[str]) -> str:
    """Return the prefix of the first stored one of `names` under `parent`; of the first name if none is."""
    stored = (f"{parent}.{name}" for name in names if is_stored(weights, f"{parent}.{name}"))
    return next(stored, f"{parent}.{names[0]}")


def stored_parts(weights: Weights, parent: str, parts: Sequence[str], fused: str) -> list[str] | str:
    """Return the prefixes of the `parts` of a layer, or the single prefix of a `fused` layer."""
    if is_stored(weights, f"{parent}.{fused}") and not is_stored(weights, f"{parent}.{parts[0]}"):
        return f"{parent}.{fused}"
    return [f"{parent}.{part}" for part in parts]


def text_prefix_and_head(weights: Weights) -> tuple[str, str]:
    """Return the prefix of the text model, and the name of its head, by the first embedding stored."""
    prefixes = (prefix for prefix in TEXT_PREFIXES if is_stored(weights, f"{prefix}.embed_tokens"))
    prefix = next(prefixes, TEXT_PREFIXES[0])
    return prefix, prefix.removesuffix("model") + "lm_head" if prefix.startswith("language") else "lm_head"


@dataclass(frozen=True)
class Making:
    """Options of loading a model's layers.

    `dtype`: of the activations. `make`, `make_experts`: factories of a module from a weight, and from
    experts; None: `get_linear` of either. `split`: split of experts over ranks. `base`, `head`: prefix of the
    text model, and name of its head, in the checkpoint.
    """

    dtype: torch.dtype
    make: LinearFactory | None = None
    make_experts: ExpertsFactory | None = None
    split: ExpertSplit | None = "tensor"
    base: str = "model"
    head: str = "lm_head"

    @classmethod
    def of(
        cls,
        weights: Weights,
        config: TextConfig,
        make: LinearFactory | None,
        make_experts: ExpertsFactory | None,
        split: ExpertSplit | None,
    ) -> "Making":
        """Create options with the dtype of `weights`, else of the `config`, and names as stored.

        `make`, `make_experts`, `split`: the fields.
        """
        dtype = weights.dtype or config.dtype or torch.float32
        return cls(dtype, make, make_experts, split, *text_prefix_and_head(weights))


def check_matrix(
    weights: Weights,
    prefixes: Sequence[str] | str,
    sizes: Sequence[int],
    features: int,
    *,
    padded: bool = False,
) -> None:
    """Raise ShapeError for a layer with another shape (N, K) than the config's.

    `prefixes`: one for each N in `sizes`, or the single name of a fused layer. `features`: K. `padded`:
    whether more outputs are allowed, as in padded vocabularies.
    """
    fused = isinstance(prefixes, str)
    layers = (
        [(prefixes, sum(sizes))] if isinstance(prefixes, str) else list(zip(prefixes, sizes, strict=True))
    )
    for prefix, size in layers:
        shape = weights.loader.shape(weights, prefix)
        if shape != (size, features) and not (padded and shape[0] >= size and shape[1] == features):
            terms = f" = {' + '.join(map(str, sizes))}" if fused and len(sizes) > 1 else ""
            more = " or more" if padded else ""
            raise ShapeError(prefix, f"({size}{more}, {features}), as the config says{terms}", shape)


def padded_size(weights: Weights, prefix: str, size: int) -> int:
    """Return the inputs of the layer `prefix`: `size`, rounded up if its format stores padded layers."""
    if weights.loader.shape(weights, prefix)[1] == size:
        return size
    (padded,) = weights.loader.describe(weights, prefix).format.weight_type.pad(size)
    return padded


def check_biases(weights: Weights, prefixes: Sequence[str] | str, expected: frozenset[str]) -> None:
    """Raise MissingTensorError for a missing bias that the config requires, by its layer's last name part."""
    for prefix in [prefixes] if isinstance(prefixes, str) else prefixes:
        name = f"{prefix}.bias"
        if prefix.rpartition(".")[2] in expected and not weights.has_tensor(name):
            raise weights.missing(name, "the config requires it")


@dataclass(frozen=True)
class SharedMatrix:
    """Split of a stored matrix over any number of ranks.

    Attributes
    ----------
    prefix
        Its prefix in the checkpoint.
    split
        The split dimension; None: replicated.
    heads
        Attention heads, which are not divided between ranks; only along "N".
    blocks
        Number of equal blocks, each of which is split: 2 for fused gate and up.
    short
        Whether the last share may be short, as that of a vocabulary.
    """

    prefix: str
    split: Split | None
    heads: Heads | None = None
    blocks: int = 1
    short: bool = False

    def parts(self, N: int, ranks: int) -> list[Part]:
        """Return the parts of a load of this matrix of `N` outputs for `ranks` ranks; DivideError."""
        if self.heads is not None:
            return self.heads.parts([(self.prefix, N)], ranks)
        if self.blocks == 1:
            return [Part(self.prefix, short=self.short)]
        edges = [0, *accumulate(split_blocks(self.prefix, "N", N, self.blocks))]
        return [Part(self.prefix, *span) for span in pairwise(edges)]


def check_shares(
    weights: Weights, config: TextConfig, prefix: str, head: str, split: ExpertSplit | None
) -> None:
    """Raise CutError or DivideError, on every rank alike, for a layer that cannot be split over the ranks.

    Decoder layers under `prefix`, embedding and `head` are checked from headers and facts. A layer that is
    quantized or repacked while it is loaded is checked by its own load.
    """
    ranks = weights.process_group.size()
    if ranks == 1:
        return

    def check(matrices: Iterator[SharedMatrix]) -> None:
        for matrix in matrices:
            N, _ = weights.loader.shape(weights, matrix.prefix)
            plan_linear(weights, matrix.parts(N, ranks), matrix.split)

    for layer in range(config.layers):
        check(layer_matrices(weights, config, prefix, layer))
        if config.sparse(layer):
            plan_experts(weights, experts_of(weights, config, prefix, layer), split)
    check(end_matrices(weights, prefix, head))


def layer_matrices(weights: Weights, config: TextConfig, prefix: str, layer: int) -> Iterator[SharedMatrix]:
    """Yield the split matrices of decoder layer number `layer` under `prefix`, except those of experts."""
    lead = f"{prefix}.layers.{layer}"
    feed_forward = first_stored(weights, lead, config.family.feed_forward)
    heads = {
        **dict.fromkeys(QUERIES, Heads(config.heads)),
        **dict.fromkeys(KEYS, Heads(keys=config.kv_heads)),
        FUSED_QKV: Heads(config.heads, config.kv_heads),
    }
    for parent in (f"{lead}.self_attn", feed_forward, *(f"{feed_forward}.{name}" for name in SHARED_EXPERTS)):
        for name in (*heads, *GATE_AND_UP, FUSED_GATE_UP, *ROW_PARALLEL):
            if is_stored(weights, f"{parent}.{name}"):
                split: Split = "K" if name in ROW_PARALLEL else "N"
                blocks = 2 if name == FUSED_GATE_UP else 1
                yield SharedMatrix(f"{parent}.{name}", split, heads.get(name), blocks)


def end_matrices(weights: Weights, prefix: str, head: str) -> Iterator[SharedMatrix]:
    """Yield the embedding, and the `head` if stored: vocabularies, whose last share may be short."""
    yield SharedMatrix(f"{prefix}.embed_tokens", "N", short=True)
    if is_stored(weights, head):
        yield SharedMatrix(head, "N", short=True)


def experts_of(weights: Weights, config: TextConfig, prefix: str, layer: int) -> str:
    """Return the prefix of the experts of decoder layer number `layer` under `prefix`."""
    feed_forward = first_stored(weights, f"{prefix}.layers.{layer}", config.family.feed_forward)
    return first_stored(weights, feed_forward, EXPERTS)
