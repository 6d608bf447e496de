"""From patches of images to vectors of a text: a projection, and a resampler that makes some few of them.

Source: `Idefics2Connector` of transformers 5.23.0.
"""

import torch
from torch import Tensor, nn

from qload.experts import GatedActivation
from qload.loader import Heads
from qload.methods import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from qload.models.attention import attend_hidden
from qload.models.feed_forward import GatedFeedForward
from qload.models.norm import Norm
from qload.models.shapes import check_matrix
from qload.models.vision.config import ResamplerConfig
from qload.models.vision.tower import hiding_all_but, of_shape
from qload.weights import Weights

WIDER = 4  # how many times wider a resampler's layers are between their matrices


class Connector(nn.Module):
    """Patches of images -> `config.latents` vectors of each image, as long as those of words.

    Parameters
    ----------
    projection
        (..., tower's hidden) -> (..., hidden).
    latents
        (latents, hidden), what every image's vectors begin as.
    layers, norm
        Those of the resampler, and its norm after the last.
    """

    latents: Tensor

    def __init__(self, projection: nn.Module, latents: Tensor, layers: list[nn.Module], norm: Norm) -> None:
        super().__init__()
        self.modality_projection, self.layers, self.norm = projection, nn.ModuleList(layers), norm
        self.register_buffer("latents", latents)

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        config: ResamplerConfig,
        features: int,
        inner: int,
        activation: GatedActivation,
    ) -> "Connector":
        """The connector under `prefix`.

        `features`: the length of a patch's vector. `inner`, `activation`: the text model's, which the
        projection has too. ShapeError for other sizes than the config's.
        """
        lead, shape = f"{prefix}.perceiver_resampler", (config.latents, config.hidden)
        projection = f"{prefix}.modality_projection"
        return cls(
            load_gated(weights, projection, (features, inner, config.hidden), activation),
            of_shape(weights, f"{lead}.latents", shape),
            [ResamplerLayer.load(weights, f"{lead}.layers.{n}", config) for n in range(config.depth)],
            Norm.load(weights, f"{lead}.norm", config.hidden, config.eps),
        )

    def forward(self, patches: Tensor, mask: Tensor) -> Tensor:
        """The vectors (images, latents, hidden) of `patches` (images, N, features).

        `mask`: (images, N), which patches are real.
        """
        context = self.modality_projection(patches)
        own = mask.new_ones((mask.shape[0], self.latents.shape[0]))
        hidden = hiding_all_but(torch.cat([mask, own], 1), context.dtype, self.latents.shape[0])
        x = self.latents.expand(patches.shape[0], -1, -1)
        for layer in self.layers:
            x = layer(x, context, hidden)
        return self.norm(x)  # type: ignore[no-any-return]


class ResamplerLayer(nn.Module):
    """Vectors of an image look at its patches and at themselves, and a feed-forward part.

    Parameters
    ----------
    queries, keys, values, out
        The matrices of this rank's heads, and of its share of the outputs' inputs.
    feed_forward
        (..., hidden) -> (..., hidden).
    norms
        Of the vectors, of the patches, and of the vectors before the feed-forward part.
    head_size
        Elements of a head.
    """

    def __init__(
        self,
        queries: nn.Module,
        keys: nn.Module,
        values: nn.Module,
        out: nn.Module,
        feed_forward: GatedFeedForward,
        norms: tuple[Norm, Norm, Norm],
        head_size: int,
    ) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = queries, keys, values, out
        self.mlp, self.head_size = feed_forward, head_size
        self.input_latents_norm, self.input_context_norm, self.post_attention_layernorm = norms

    @classmethod
    def load(cls, weights: Weights, prefix: str, config: ResamplerConfig) -> "ResamplerLayer":
        """The layer under `prefix`."""
        lead, hidden, size = f"{prefix}.self_attn.", config.hidden, config.head_size
        check_matrix(weights, f"{lead}q_proj", [config.heads * size], hidden)
        check_matrix(weights, f"{lead}o_proj", [hidden], config.heads * size)
        for name in ("k_proj", "v_proj"):
            check_matrix(weights, f"{lead}{name}", [config.kv_heads * size], hidden)
        keys, values = (
            ColumnParallelLinear.load(weights, f"{lead}{name}", heads=Heads(keys=config.kv_heads))
            for name in ("k_proj", "v_proj")
        )
        latents, context, second = (
            Norm.load(weights, f"{prefix}.{name}", hidden, config.eps)
            for name in ("input_latents_norm", "input_context_norm", "post_attention_layernorm")
        )
        return cls(
            ColumnParallelLinear.load(weights, f"{lead}q_proj", heads=Heads(queries=config.heads)),
            keys,
            values,
            RowParallelLinear.load(weights, f"{lead}o_proj"),
            load_gated(weights, f"{prefix}.mlp", (hidden, WIDER * hidden, hidden), config.activation),
            (latents, context, second),
            size,
        )

    def forward(self, x: Tensor, context: Tensor, hidden: Tensor) -> Tensor:
        """The vectors x (images, latents, hidden) after this layer.

        `context`: (images, N, hidden), the patches; `hidden`: (images, 1, latents, N + latents), added to
        scores.
        """
        own = self.input_latents_norm(x)
        both = torch.cat([self.input_context_norm(context), own], 1)
        made = (self.q_proj(own), self.k_proj(both), self.v_proj(both))
        q, k, v = (each.unflatten(-1, (-1, self.head_size)) for each in made)
        x = x + self.o_proj(attend_hidden(q, k, v, hidden, scale=self.head_size**-0.5).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


def load_gated(
    weights: Weights, prefix: str, sizes: tuple[int, int, int], activation: GatedActivation
) -> GatedFeedForward:
    """Gate, up and down under `prefix`; `sizes`: inputs, what lies between, and outputs."""
    features, inner, outputs = sizes
    names, down = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], f"{prefix}.down_proj"
    check_matrix(weights, names, [inner, inner], features)
    check_matrix(weights, down, [outputs], inner)
    gate_up = MergedColumnParallelLinear.load(weights, names)
    return GatedFeedForward(gate_up, RowParallelLinear.load(weights, down), activation)
