"""`Decoder`: a text model as layers over typed weights, whichever family it is of."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from qload.architecture.adapters import refuse_adapters
from qload.detect import read_model_config
from qload.errors import ConfigError, StorageError, UnsupportedFormatError, checked
from qload.experts import ExpertFacts, ExpertSplit
from qload.listing import check_all_read
from qload.loader.finite_scales import Nonfinite
from qload.methods import ParallelLMHead, VocabParallelEmbedding
from qload.methods.loaded import LinearFactory
from qload.methods.parallel_experts import ExpertsFactory
from qload.models.attention import Attention
from qload.models.config import TextConfig, text_config
from qload.models.feed_forward import GatedFeedForward, SparseFeedForward
from qload.models.kv_cache import PagedCache, Step
from qload.models.latent_attention import LatentAttention
from qload.models.norm import Norm
from qload.models.rope import Rope
from qload.models.stored_layers import check_matrix, check_shares, first_stored, is_stored, text_within
from qload.parallel import ProcessGroup
from qload.weights import Weights, open_checkpoint


class Block(nn.Module):
    """A decoder layer: attention and a feed-forward part, each on a norm of x, and added to it.

    Parameters
    ----------
    attention
        (x (T, H), step, cache, layer) -> (T, H).
    feed_forward
        (T, H) -> (T, H).
    norms
        Those before the two.
    """

    def __init__(self, attention: nn.Module, feed_forward: nn.Module, norms: tuple[Norm, Norm]) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, feed_forward
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(
        self, x: Tensor, step: Step, cache: PagedCache, layer: int, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Two summands (T, H) of the tokens of a `step` after this `layer`, for the next norm to add.

        The tokens before it are `x` (T, H), plus `added` where there is one. Keys and values go to `cache`.
        """
        norm = self.input_layernorm
        x, normed = (x, norm(x)) if added is None else norm.of_sum(x, added)
        x, normed = self.post_attention_layernorm.of_sum(x, self.self_attn(normed, step, cache, layer))
        return x, self.mlp(normed)


class Decoder(nn.Module):
    """A text model, or one rank's share of it: every rank gets all logits.

    Parameters
    ----------
    config
        What the model's config says.
    embedding
        ids (T,) -> (T, H).
    blocks
        The decoder layers.
    norm, head
        After the last of them: (T, H) -> (T, H), and (T, H) -> (T, vocab).
    """

    def __init__(
        self, config: TextConfig, embedding: nn.Module, blocks: Sequence[Block], norm: Norm, head: nn.Module
    ) -> None:
        super().__init__()
        self.config: TextConfig = config
        self.embed_tokens, self.blocks, self.norm, self.lm_head = embedding, nn.ModuleList(blocks), norm, head

    def embed(self, ids: Tensor) -> Tensor:
        """The vectors (T, H) of words `ids` (T,), integers below `config.vocab`."""
        return self.embed_tokens(ids)  # type: ignore[no-any-return]

    def hidden(self, x: Tensor, step: Step, cache: PagedCache) -> Tensor:
        """What all layers make of the vectors `x` (T, H) of a `step`, by `cache`: (T, H), not normalized."""
        step = step.begun()
        added: Tensor | None = None
        for layer, block in enumerate(self.blocks):
            x, added = block(x, step, cache, layer, added)
        return x if added is None else x + added

    def logits(self, x: Tensor) -> Tensor:
        """The logits (T, vocab) of what the last layer made, x (T, H)."""
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]

    def forward(self, ids: Tensor, step: Step, cache: PagedCache) -> Tensor:
        """The logits (T, vocab) of the words `ids` (T,) of a `step`, whose keys and values go to `cache`."""
        return self.logits(self.hidden(self.embed(ids), step, cache))


log: logging.Logger = logging.getLogger("qload")

SHOWN = 5  # names of tensors in a message


@dataclass(frozen=True)
class Making:
    """How the layers of a model are made.

    `dtype`: of the activations. `make`, `make_experts`: the module of a weight, and of experts; None: their
    own. `split`: how ranks share experts. `base`, `head`: what names begin with, and that of the head.
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
        """Of activations of the type of `weights`, else as the `config` says, and names as they are stored.

        `make`, `make_experts`, `split`: the fields.
        """
        dtype = weights.dtype or config.dtype or torch.float32
        return cls(dtype, make, make_experts, split, *text_within(weights))


def opened(
    path: str | PathLike[str],
    config: Mapping[str, Any],
    device: torch.device | str,
    dtype: torch.dtype | None,
    process_group: ProcessGroup | None,
    facts: ExpertFacts | None = None,
    nonfinite: Nonfinite = "error",
) -> Weights:
    """A checkpoint's tensors, plain floats cast to `dtype`; None: as its `config` says."""
    said = dtype or checked_config(path, config, facts).dtype or torch.float32
    options: dict[str, Any] = {"device": device, "process_group": process_group, "nonfinite": nonfinite}
    return open_checkpoint(path, dtype=said, **options)


def checked_config(
    checkpoint: Weights | str | PathLike[str], config: Mapping[str, Any], facts: ExpertFacts | None = None
) -> TextConfig:
    """Read the model's configuration from a `config` and `facts`; ConfigError for an unsupported model.

    For a `checkpoint` that is not read, UnreadTensorsError or UnsupportedFormatError takes precedence.
    """
    try:
        return text_config(config, facts)
    except ConfigError as error:
        try:
            with (
                nullcontext(checkpoint)
                if isinstance(checkpoint, Weights)
                else open_checkpoint(checkpoint) as it
            ):
                check_all_read(it)
        except (StorageError, ConfigError) as other:
            if other.rule == UnsupportedFormatError.rule:
                raise
        raise error


@checked
def load_model(
    weights: Weights | str | PathLike[str],
    config: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    process_group: ProcessGroup | None = None,
    make: LinearFactory | None = None,
    make_experts: ExpertsFactory | None = None,
    expert_split: ExpertSplit | None = "tensor",
    facts: ExpertFacts | None = None,
    nonfinite: Nonfinite = "error",
) -> Decoder:
    """The text model of a checkpoint, or this rank's share of it, in whichever format its weights are.

    Of a model that sees or hears too, the text alone; see `load_vision_model`.

    Parameters
    ----------
    weights
        The path of a checkpoint, or its tensors, whose device, dtype and process group then count.
    config
        The whole `config.json`; None: that of the path, or what `weights` knows of it.
    device, dtype, process_group, nonfinite
        Those of `open_checkpoint`. `dtype`: of activations and plain floats; None: as the config says.
    make, make_experts
        What makes a module of a typed weight, its bias and what finds a maximum over the ranks, and one of
        the experts of a layer; None: `get_linear` of either.
    expert_split
        How ranks share the experts: "tensor", each of every one; "experts", whole ones.
    facts
        What experts do between their matrices, and where the routing weight goes; None: as the config says.
        ArgumentError for a model without experts.

    Raises
    ------
    ConfigError
        For a type that there is no model of, those that there are listed, and for sizes that are none.
    UnsupportedFormatError
        For a model with adapters that are not merged.
    MissingTensorError, ShapeError
        Where the checkpoint has not what the config says.
    CutError, DivideError
        Where the ranks cannot share it.
    UnreadTensorsError
        Where a tensor of the checkpoint is in a form that no format reads.
    NonfiniteScaleError
        Where a scale is NaN or infinite.
    """
    if not isinstance(weights, Weights):
        config = read_model_config(weights) if config is None else config
        with opened(weights, config, device, dtype, process_group, facts, nonfinite) as found:
            return _loaded(found, text_config(config, facts), make, make_experts, expert_split)
    if config is None:
        known = weights.architecture
        config = {} if known is None else {**known.config, "model_type": known.type}
    return _loaded(weights, checked_config(weights, config, facts), make, make_experts, expert_split)


def _loaded(
    weights: Weights,
    config: TextConfig,
    make: LinearFactory | None,
    make_experts: ExpertsFactory | None,
    split: ExpertSplit | None,
) -> Decoder:
    model = load_decoder(weights, config, Making.of(weights, config, make, make_experts, split))
    tell_unused(weights, config.type)
    return model


def tell_unused(weights: Weights, kind: str) -> None:
    """Log which tensors no layer of a model of type `kind` read, but for those that the ledger explains."""
    unused = weights.report().unused
    if unused:
        names = ", ".join(unused[:SHOWN]) + (f" and {len(unused) - SHOWN} more" if unused[SHOWN:] else "")
        log.warning("%d tensors are of no layer of a %s model: %s", len(unused), kind, names)


def load_decoder(weights: Weights, config: TextConfig, making: Making) -> Decoder:
    """The decoder of a `config` whose names begin with `making.base`, for this rank of `weights`.

    Errors are those of `load_model`. What else a checkpoint holds, such as a part that sees,
    is not looked at.
    """
    check_all_read(weights)
    refuse_adapters(weights.storage.keys())
    check_shares(weights, config, making.base, making.head, making.split)
    name = f"{making.base}.embed_tokens"
    check_matrix(weights, name, [config.vocab], config.hidden, padded=True)
    embedding = VocabParallelEmbedding.load(weights, name)
    rope = Rope(config.rope, weights.device)
    blocks = [load_block(weights, config, making, layer, rope) for layer in range(config.layers)]
    norm = Norm.load(weights, f"{making.base}.norm", config.hidden, config.eps)
    tied = embedding if config.tied else None
    if not config.tied or is_stored(weights, making.head):
        check_matrix(weights, making.head, [config.vocab], config.hidden, padded=True)
    head = ParallelLMHead.load(weights, making.head, vocab=config.vocab, tied_to=tied, make=making.make)
    return Decoder(config, embedding, blocks, norm, head)


def load_block(weights: Weights, config: TextConfig, making: Making, layer: int, rope: Rope) -> Block:
    """One decoder layer, by its number `layer`; `rope`: that of all layers."""
    prefix = f"{making.base}.layers.{layer}"
    input_norm, second_norm = (
        Norm.load(weights, f"{prefix}.{name}", config.hidden, config.eps)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    attention = load_attention(weights, f"{prefix}.self_attn", config, making, layer, rope)
    feed_forward = load_feed_forward(weights, prefix, config, making, layer)
    return Block(attention, feed_forward, (input_norm, second_norm))


def load_attention(
    weights: Weights, prefix: str, config: TextConfig, making: Making, layer: int, rope: Rope
) -> nn.Module:
    """The attention of a layer, of the kind that the config says."""
    if config.latent is not None:
        return LatentAttention.load(weights, prefix, config, rope, making.make)
    return Attention.load(weights, prefix, config, layer, rope, making.make)


def load_feed_forward(
    weights: Weights, prefix: str, config: TextConfig, making: Making, layer: int
) -> nn.Module:
    """The feed-forward part of the layer under `prefix`: experts, or one pair of products."""
    name = first_stored(weights, prefix, config.family.feed_forward)
    if not config.sparse(layer):
        return GatedFeedForward.load(weights, name, config, config.inner, make=making.make)
    return SparseFeedForward.load(
        weights,
        name,
        config,
        making.dtype,
        make=making.make,
        make_experts=making.make_experts,
        split=making.split,
    )
