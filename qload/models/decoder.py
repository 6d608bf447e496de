"""`Decoder`: a text model as layers over typed weights, whichever family it is of."""

from collections.abc import Sequence

from torch import Tensor, nn

from qload.models.cache import PagedCache
from qload.models.config import TextConfig
from qload.models.norm import Norm
from qload.models.step import Step


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
