"""`Decoder`: a text model over typed weights, and its loading from a checkpoint of any format."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from qload.architecture.names import refuse_adapters
from qload.checkpoint import Checkpoint, check_all_read
from qload.errors import ConfigError, checked
from qload.errors.exceptions import list_names
from qload.experts import ExpertFacts, ExpertSplit
from qload.loader.source import Nonfinite
from qload.methods import ParallelLMHead, VocabParallelEmbedding
from qload.methods.checkpoint_linear import LinearFactory
from qload.methods.layers import ExpertsFactory
from qload.models.attention import Attention, LatentAttention
from qload.models.config import TextConfig, text_config
from qload.models.feed_forward import GatedFeedForward, SparseFeedForward
from qload.models.kv_cache import PagedCache, Step
from qload.models.norm import Norm
from qload.models.rope import Rope
from qload.models.stored_layers import Making, check_matrix, check_shares, first_stored, is_stored
from qload.parallel import Collectives, ProcessGroup, collectives_of
from qload.weights import Weights

log: logging.Logger = logging.getLogger("qload")

MAX_LISTED_NAMES = 5


class Block(nn.Module):
    """Decoder layer: attention and a feed-forward part, each with a norm before it and a residual connection.

    Parameters
    ----------
    attention
        (x (T, H), step, cache, layer) -> (T, H).
    feed_forward
        (T, H) -> (T, H).
    norms
        Norms before the two.
    ranks
        Ranks over which the outputs of the two parts are summed; None: they are sums already.
    """

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        norms: tuple[Norm, Norm],
        ranks: Collectives | None = None,
    ) -> None:
        super().__init__()
        self.ranks: Collectives | None = ranks
        self.self_attn, self.mlp = attention, feed_forward
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(
        self, x: Tensor, step: Step, cache: PagedCache, layer: int, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run this `layer` on the tokens of a `step`; return two summands (T, H), for the next norm to add.

        Input: `x` (T, H), plus `added` if given. Keys and values go to `cache`. With `ranks`, `added` and the
        second summand are those of this rank.
        """
        norm, ranks = self.input_layernorm, self.ranks
        x, normed = (x, norm(x)) if added is None else norm.of_sum(x, added, ranks)
        attended = self.self_attn(normed, step, cache, layer)
        x, normed = self.post_attention_layernorm.of_sum(x, attended, ranks)
        return x, self.mlp(normed)


class Decoder(nn.Module):
    """Text model, or one rank's share of it; every rank returns all logits.

    Parameters
    ----------
    config
        Config of the text model.
    embedding
        ids (T,) -> (T, H).
    blocks
        Decoder layers.
    norm, head
        Final norm, (T, H) -> (T, H), and head, (T, H) -> (T, vocab).
    """

    def __init__(
        self, config: TextConfig, embedding: nn.Module, blocks: Sequence[Block], norm: Norm, head: nn.Module
    ) -> None:
        super().__init__()
        self.config: TextConfig = config
        self.embed_tokens, self.blocks, self.norm, self.lm_head = embedding, nn.ModuleList(blocks), norm, head

    def embed(self, ids: Tensor) -> Tensor:
        """Embed the token `ids` (T,), integers below `config.vocab`: (T, H)."""
        return self.embed_tokens(ids)  # type: ignore[no-any-return]

    def hidden(self, x: Tensor, step: Step, cache: PagedCache) -> Tensor:
        """Run all layers on embeddings `x` (T, H) of a `step` with its `cache`: (T, H), not normalized."""
        step = step.begun()
        added: Tensor | None = None
        blocks: Any = self.blocks
        for layer, block in enumerate(blocks):
            x, added = block(x, step, cache, layer, added)
        if added is None:
            return x
        ranks = blocks[-1].ranks
        return x + (added if ranks is None else ranks.summed(added))

    def logits(self, x: Tensor) -> Tensor:
        """Compute the logits (T, vocab) of the last layer's output x (T, H)."""
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]

    def forward(self, ids: Tensor, step: Step, cache: PagedCache) -> Tensor:
        """Compute the logits (T, vocab) of token `ids` (T,) of a `step`; keys and values go to `cache`."""
        return self.logits(self.hidden(self.embed(ids), step, cache))


@contextmanager
def open_for_model(
    weights: Weights | str | PathLike[str],
    config: Mapping[str, Any] | None,
    device: torch.device | str,
    dtype: torch.dtype | None,
    process_group: ProcessGroup | None,
    facts: ExpertFacts | None,
    nonfinite: Nonfinite,
) -> Iterator[tuple[Weights, Mapping[str, Any]]]:
    """Open the checkpoint at a path, with its config; open tensors are passed through with theirs.

    `dtype` None: plain floats are cast as the config says.
    """
    if isinstance(weights, Weights):
        yield weights, config or {}
        return
    with Checkpoint.open(weights) as checkpoint:
        values = checkpoint.model_config if config is None else config
        dtype = dtype or checked_config(checkpoint.weights, values, facts).dtype or torch.float32
        options: dict[str, Any] = {"device": device, "process_group": process_group, "nonfinite": nonfinite}
        yield checkpoint.weights_for(dtype=dtype, **options), values


def checked_config(
    weights: Weights, config: Mapping[str, Any], facts: ExpertFacts | None = None
) -> TextConfig:
    """Read the text model's config from a `config` and `facts`; ConfigError for an unsupported model.

    UnreadTensorsError for the `weights` takes precedence.
    """
    with unread_tensors_first(weights):
        return text_config(config, facts)


@contextmanager
def unread_tensors_first(weights: Weights) -> Iterator[None]:
    """Raise UnreadTensorsError for the `weights`, if there are such tensors, in place of a ConfigError."""
    try:
        yield
    except ConfigError:
        check_all_read(weights)
        raise


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
    """Load the text model of a checkpoint of any format, or this rank's share of it.

    Of a multimodal model the text model alone is loaded; see `load_vision_model`.

    Parameters
    ----------
    weights
        Path of a checkpoint, or its open tensors, with their own device, dtype and process group.
    config
        The whole `config.json`; None: that of the path, or the known config of `weights`.
    device, dtype, process_group, nonfinite
        As in `open_checkpoint`. `dtype`: of activations and plain floats; None: as the config says.
    make, make_experts
        Factories of a module: from a typed weight, its bias and a function that finds a maximum over the
        ranks; from the experts of a layer. None: `get_linear` of either.
    expert_split
        Split of experts over ranks: "tensor", a share of each expert; "experts", whole experts.
    facts
        Activation and routing weight of experts; None: as the config says. ArgumentError for a model without
        experts.

    Raises
    ------
    ConfigError
        For an unsupported model type, with a list of the supported ones, and for invalid sizes.
    UnsupportedFormatError
        For a model with adapters that are not merged.
    MissingTensorError, ShapeError
        For a tensor of the config that is missing, or that has another shape.
    CutError, DivideError
        For a layer that cannot be split over the ranks.
    UnreadTensorsError
        For a tensor that no format reads.
    NonfiniteScaleError
        For a scale that is NaN or infinite.
    """
    if config is None and isinstance(weights, Weights) and weights.architecture is not None:
        config = weights.architecture.model_config
    with open_for_model(weights, config, device, dtype, process_group, facts, nonfinite) as (opened, values):
        text = checked_config(opened, values, facts)
        making = Making.of(opened, text, make, make_experts, expert_split)
        model = load_decoder(opened, text, making)
        warn_unused(opened, text.type)
        return model


def warn_unused(weights: Weights, model_type: str) -> None:
    """Log the tensors outside of all layers of a model of type `model_type`, except exempt ones."""
    names = weights.report().unused
    if names:
        listed = list_names(names, MAX_LISTED_NAMES)
        log.warning("%d tensors belong to no layer of a %s model: %s", len(names), model_type, listed)


def load_decoder(weights: Weights, config: TextConfig, making: Making) -> Decoder:
    """Load the decoder of a `config` under the prefix `making.base`, for this rank of `weights`.

    Errors as of `load_model`. Other parts of a checkpoint, such as a vision tower, are ignored.
    """
    check_all_read(weights)
    refuse_adapters(weights.storage.keys())
    check_shares(weights, config, making.base, making.head, making.split)
    name = f"{making.base}.embed_tokens"
    check_matrix(weights, name, [config.vocab], config.hidden, padded=True)
    embedding = VocabParallelEmbedding.load(weights, name)
    rope = Rope(config.rope, weights.device)
    blocks = [_load_block(weights, config, making, layer, rope) for layer in range(config.layers)]
    norm = Norm.load(weights, f"{making.base}.norm", config.hidden, config.eps)
    tied = embedding if config.tied else None
    if not config.tied or is_stored(weights, making.head):
        check_matrix(weights, making.head, [config.vocab], config.hidden, padded=True)
    head = ParallelLMHead.load(weights, making.head, vocab=config.vocab, tied_to=tied, make=making.make)
    return Decoder(config, embedding, blocks, norm, head)


def _load_block(weights: Weights, config: TextConfig, making: Making, layer: int, rope: Rope) -> Block:
    prefix = f"{making.base}.layers.{layer}"
    input_norm, second_norm = (
        Norm.load(weights, f"{prefix}.{name}", config.hidden, config.eps)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    group = weights.process_group
    ranks = None if group.size() == 1 else collectives_of(group)
    attention: nn.Module
    name = f"{prefix}.self_attn"
    if config.latent is not None:
        attention = LatentAttention(weights, name, config, rope, making.make, reduce_results=False)
    else:
        attention = Attention(weights, name, config, layer, rope, making.make, reduce_results=False)
    feed_forward: nn.Module
    name = first_stored(weights, prefix, config.family.feed_forward)
    if config.sparse(layer):
        feed_forward = SparseFeedForward(weights, name, config, making, reduce_results=False)
    else:
        sizes, activation = (config.hidden, config.inner, config.hidden), config.activation
        options: dict[str, Any] = {"biases": config.biases, "make": making.make, "reduce_results": False}
        feed_forward = GatedFeedForward.load(weights, name, sizes, activation, **options)
    return Block(attention, feed_forward, (input_norm, second_norm), ranks)
