"""From a checkpoint of any format to a `Decoder`: every tensor through `Weights`, every size checked."""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn

from qload.architecture.adapters import refuse_adapters
from qload.detect import read_model_config
from qload.errors import ConfigError, StorageError, UnsupportedFormatError, checked
from qload.experts import ExpertFacts, ExpertSplit
from qload.listing import check_all_read
from qload.loader.finite_scales import Nonfinite
from qload.methods import ParallelLMHead, VocabParallelEmbedding
from qload.methods.loaded import LinearFactory
from qload.methods.parallel_experts import ExpertsFactory
from qload.models.attention_layer import Attention
from qload.models.config import TextConfig, text_config
from qload.models.decoder import Block, Decoder
from qload.models.feed_forward import GatedFeedForward, SparseFeedForward
from qload.models.latent_attention import LatentAttention
from qload.models.names import first_stored, is_stored, text_within
from qload.models.norm import Norm
from qload.models.rope import Rope
from qload.models.shapes import check_matrix
from qload.models.shares import check_shares
from qload.parallel import ProcessGroup
from qload.weights import Weights, open_checkpoint

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
