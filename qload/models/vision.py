"""A text model that sees: what a tower and a connector make of images stands among the vectors of words.

    model = load_vision_model(path)
    images = model.images(pixels, pixel_mask)                # (images * vectors of each, H)
    logits = model(ids, step, cache, images)

The tower and the connector are loaded with a loader of plain weights, within `use_loader`, so that no
quantizer reaches them: neither that of the checkpoint nor one that quantizes while loading.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, embedding, layer_norm

from qload.detect import DefaultWeightsLoader, read_model_config
from qload.errors import ArgumentError, ShapeError, checked
from qload.experts import ExpertFacts, ExpertSplit, GatedActivation
from qload.experts.gated import PLAIN
from qload.listing import check_all_read
from qload.loader import Heads
from qload.loader.finite_scales import Nonfinite
from qload.methods import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from qload.methods.loaded import LinearFactory
from qload.methods.parallel_experts import ExpertsFactory
from qload.models.attention import attend_hidden
from qload.models.config import text_config
from qload.models.decoder import Decoder, Making, load_decoder, opened, tell_unused
from qload.models.feed_forward import GatedFeedForward
from qload.models.kv_cache import PagedCache, Step
from qload.models.norm import Norm, vector
from qload.models.stored_layers import check_matrix, check_shares
from qload.models.vision_config import ResamplerConfig, TowerConfig, sight_config
from qload.parallel import ProcessGroup
from qload.weights import Weights

INSIDE = 1.0 - 1e-6  # the last place of an image's side, from 0 to 1


@checked
def real_images(pixels: Tensor, pixel_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The images of all texts, one after another, without those that only fill a batch, which are all 0.

    `pixels`: (images, channels, height, width), or (texts, images, channels, height, width). `pixel_mask`:
    which pixels are real, as `pixels` without channels, bool or integers; None: all. Both are given back,
    the mask as bool (images, height, width). ShapeError.
    """
    if pixels.ndim not in (4, 5):
        raise ShapeError("pixels", "([texts,] images, channels, height, width)", tuple(pixels.shape))
    flat = pixels.flatten(0, -4)
    mask = flat.new_ones((flat.shape[0], *flat.shape[2:]), dtype=torch.bool)
    if pixel_mask is not None:
        expected = (*pixels.shape[:-3], *pixels.shape[-2:])
        if tuple(pixel_mask.shape) != expected:
            raise ShapeError("pixel_mask", f"{expected}, as pixels", tuple(pixel_mask.shape))
        mask = pixel_mask.reshape(mask.shape).bool()
    real = flat.ne(0).flatten(1).any(1)
    return flat[real], mask[real]


def patch_mask(pixel_mask: Tensor, patch: int) -> Tensor:
    """Which patches of `patch` x `patch` pixels are real: (images, rows, columns), bool.

    `pixel_mask`: (images, height, width), bool; what lies beyond the last whole patch counts for nothing.
    ShapeError for images that are smaller than a patch.
    """
    if min(pixel_mask.shape[1:]) < patch:
        expected = f"(images, height, width) of at least a patch, {patch} x {patch}"
        raise ShapeError("pixel_mask", expected, tuple(pixel_mask.shape))
    patches = pixel_mask.unfold(1, patch, patch).unfold(2, patch, patch)
    return patches.all(-1).all(-1)


def patch_positions(mask: Tensor, side: int) -> Tensor:
    """The trained position of each patch: (images, rows * columns), int64, 0 <= position < `side` ** 2.

    An image's own rows and columns, which `mask` (images, rows, columns) tells, are spread over the `side`
    x `side` positions that were trained; patches that are no image's have position 0. ArgumentError for an
    image whose first row or column of patches is not its own.
    """
    counts = mask[:, :, 0].sum(1), mask[:, 0, :].sum(1)
    if any(bool(count.eq(0).any()) for count in counts):
        raise ArgumentError("pixel_mask", "a whole patch at the top and at the left of each image", "none")
    rows, columns = (_buckets(count, size, side) for count, size in zip(counts, mask.shape[1:], strict=True))
    positions = rows[:, :, None] * side + columns[:, None, :]
    return torch.where(mask, positions, 0).flatten(1)


def _buckets(count: Tensor, size: int, side: int) -> Tensor:
    """Of each of `size` places, of which an image has `count` (images,): which of `side` places it is."""
    borders = torch.arange(1 / side, 1.0, 1 / side, device=count.device)
    places = torch.arange(size, device=count.device, dtype=torch.float32)
    fractions = places[None, :] * (1.0 / count)[:, None]
    return torch.bucketize(fractions.clamp(max=INSIDE), borders, right=True)


class Tower(nn.Module):
    """Images -> a vector of each of their patches.

    Parameters
    ----------
    config
        What the model's config says.
    patches, patch_bias, positions
        (hidden, channels, patch, patch), (hidden,) and (side * side, hidden).
    layers
        (images, N, hidden), hidden patches -> (images, N, hidden).
    norm
        After the last of them.
    """

    patches: Tensor
    patch_bias: Tensor
    positions: Tensor

    def __init__(
        self,
        config: TowerConfig,
        patches: Tensor,
        patch_bias: Tensor,
        positions: Tensor,
        layers: list[nn.Module],
        norm: nn.Module,
    ) -> None:
        super().__init__()
        self.config: TowerConfig = config
        for name, held in (("patches", patches), ("patch_bias", patch_bias), ("positions", positions)):
            self.register_buffer(name, held)
        self.layers, self.post_layernorm = nn.ModuleList(layers), norm

    @classmethod
    def load(cls, weights: Weights, prefix: str, config: TowerConfig) -> "Tower":
        """The tower under `prefix`, for this rank's heads; ShapeError for other sizes than the config's."""
        lead, size = f"{prefix}.embeddings.", config.hidden
        patches = (size, config.channels, config.patch, config.patch)
        return cls(
            config,
            of_shape(weights, f"{lead}patch_embedding.weight", patches),
            vector(weights, f"{lead}patch_embedding.bias", size),
            of_shape(weights, f"{lead}position_embedding.weight", (config.side**2, size)),
            [TowerLayer.load(weights, f"{prefix}.encoder.layers.{n}", config) for n in range(config.layers)],
            CenteredNorm.load(weights, f"{prefix}.post_layernorm", size, config.eps),
        )

    def forward(self, pixels: Tensor, mask: Tensor) -> Tensor:
        """The patches of `pixels` (images, channels, height, width): (images, rows * columns, hidden).

        `mask`: (images, rows, columns), which patches are real; no patch sees another one.
        """
        if pixels.shape[1] != self.config.channels:
            expected = f"(images, {self.config.channels}, height, width)"
            raise ShapeError("pixels", expected, tuple(pixels.shape))
        x = conv2d(pixels, self.patches, self.patch_bias, self.config.patch).flatten(2).transpose(1, 2)
        x = x + embedding(patch_positions(mask, self.config.side), self.positions)
        hidden = hiding_all_but(mask.flatten(1), x.dtype, x.shape[1])
        for layer in self.layers:
            x = layer(x, hidden)
        return self.post_layernorm(x)  # type: ignore[no-any-return]


class TowerLayer(nn.Module):
    """Attention and a feed-forward part, each on a norm of x, and added to it.

    Parameters
    ----------
    qkv, out
        The matrices of queries, keys and values of this rank's heads, and what takes their outputs.
    widen, narrow
        The feed-forward part's: this rank's outputs, and its inputs.
    norms
        Those before the two parts.
    activation
        Between `widen` and `narrow`.
    """

    def __init__(
        self,
        qkv: QKVParallelLinear,
        out: nn.Module,
        widen: nn.Module,
        narrow: nn.Module,
        norms: tuple[nn.Module, nn.Module],
        activation: GatedActivation,
    ) -> None:
        super().__init__()
        self.qkv_proj, self.out_proj, self.fc1, self.fc2 = qkv, out, widen, narrow
        self.layer_norm1, self.layer_norm2 = norms
        self.activation = PLAIN[activation.kind]

    @classmethod
    def load(cls, weights: Weights, prefix: str, config: TowerConfig) -> "TowerLayer":
        """The layer under `prefix`."""
        hidden, names = config.hidden, [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        out, widen, narrow = f"{prefix}.self_attn.out_proj", f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"
        check_matrix(weights, names, [hidden] * 3, hidden)
        check_matrix(weights, out, [hidden], hidden)
        check_matrix(weights, widen, [config.inner], hidden)
        check_matrix(weights, narrow, [hidden], config.inner)
        first, second = (
            CenteredNorm.load(weights, f"{prefix}.layer_norm{place}", hidden, config.eps) for place in (1, 2)
        )
        heads = Heads(config.heads, config.heads)
        return cls(
            QKVParallelLinear.load(weights, names, heads, head_size=hidden // config.heads),
            RowParallelLinear.load(weights, out),
            ColumnParallelLinear.load(weights, widen),
            RowParallelLinear.load(weights, narrow),
            (first, second),
            config.activation,
        )

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """The patches x (images, N, hidden) after this layer; `hidden`: what is added to scores."""
        size = self.qkv_proj.head_size
        qkv = self.qkv_proj(self.layer_norm1(x))
        q, k, v = (each.unflatten(-1, (-1, size)) for each in qkv.chunk(3, -1))
        x = x + self.out_proj(attend_hidden(q, k, v, hidden, scale=size**-0.5).flatten(2))
        return x + self.fc2(self.activation(self.fc1(self.layer_norm2(x))))  # type: ignore[no-any-return]


class CenteredNorm(nn.Module):
    """x (..., H) less its mean, divided by its deviation, times a weight (H,) and plus a bias (H,)."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        super().__init__()
        self.eps: float = eps
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    @classmethod
    def load(cls, weights: Weights, prefix: str, size: int, eps: float) -> "CenteredNorm":
        """The norm under `prefix`, of `size` numbers; ShapeError where it has others."""
        weight, bias = (vector(weights, f"{prefix}.{name}", size) for name in ("weight", "bias"))
        return cls(weight, bias, eps)

    def forward(self, x: Tensor) -> Tensor:
        """X (..., H), normalized along its last dimension."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def hiding_all_but(mask: Tensor, dtype: torch.dtype, queries: int) -> Tensor:
    """What is added to scores (images, 1, queries, keys): 0 where `mask` (images, keys) is, else -inf."""
    hidden = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return hidden[:, None, None].expand(-1, 1, queries, -1)


def of_shape(weights: Weights, name: str, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor `name`, on every rank; ShapeError where it has another shape."""
    if weights.get_shape(name) != shape:
        raise ShapeError(name, f"{shape}, as the config says", weights.get_shape(name))
    return weights.get_tensor(name)


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


class VisionModel(nn.Module):
    """A text model with a tower and a connector, or one rank's share of them.

    Parameters
    ----------
    text
        What reads.
    tower, connector
        What sees, and what makes vectors of a text of that.
    image_token
        The word in whose places an image's vectors are put.
    """

    def __init__(self, text: Decoder, tower: Tower, connector: Connector, image_token: int) -> None:
        super().__init__()
        self.text, self.tower, self.connector = text, tower, connector
        self.image_token: int = image_token

    def images(self, pixels: Tensor, pixel_mask: Tensor | None = None) -> Tensor:
        """The vectors of all images, one image after another: (images * latents, H).

        `pixels`: ([texts,] images, channels, height, width), floats; images that are 0 everywhere fill a
        batch, and have none. `pixel_mask`: ([texts,] images, height, width), which pixels are real; None:
        all. ShapeError, and ArgumentError for an image without a patch of its own.
        """
        pixels, real = real_images(pixels, pixel_mask)
        if not len(pixels):
            return self.connector.latents[:0]
        mask = patch_mask(real, self.tower.config.patch)
        patches = self.tower(pixels.to(self.tower.patches), mask)
        return self.connector(patches, mask.flatten(1)).flatten(0, 1)  # type: ignore[no-any-return]

    def embed(self, ids: Tensor, images: Tensor | None = None) -> Tensor:
        """The vectors (T, H) of words `ids` (T,), those of `images` (vectors, H) in the places of their word.

        ShapeError where there are not as many places as vectors. None: the word is one as any other.
        """
        x = self.text.embed(ids)
        if images is None:
            return x
        places = (ids == self.image_token).nonzero().squeeze(1)
        if (len(places), x.shape[1]) != tuple(images.shape):
            expected = f"({len(places)}, {x.shape[1]}), as the text has so many places for images"
            raise ShapeError("images", expected, tuple(images.shape))
        return x.index_copy(0, places, images.to(x))

    def forward(self, ids: Tensor, step: Step, cache: PagedCache, images: Tensor | None = None) -> Tensor:
        """The logits (T, vocab) of the words `ids` (T,) of a `step`, whose keys and values go to `cache`.

        `images`: as of `embed`, those of the new tokens.
        """
        return self.text.logits(self.text.hidden(self.embed(ids, images), step, cache))


@checked
def load_vision_model(
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
) -> VisionModel:
    """The model of a checkpoint that sees, or this rank's share of it.

    The text may be stored in any format, or be quantized while it is loaded; what sees stays plain. All
    parameters are those of `load_model`, and the `config` stays as it is.

    Parameters
    ----------
    weights, config
        A path, or tensors and the whole `config.json`, without which tensors say too little.
    device, dtype, process_group, nonfinite
        Of a path.
    make, make_experts, expert_split, facts
        Of the text.

    Raises
    ------
    ConfigError
        For a type that does not see, those that do listed, and for what cannot be believed.
    MissingTensorError, ShapeError
        Where the checkpoint has not what the config says.
    CutError, DivideError
        Where the ranks cannot share it.
    """
    if not isinstance(weights, Weights):
        config = read_model_config(weights) if config is None else config
        with opened(weights, config, device, dtype, process_group, facts, nonfinite) as found:
            return load_vision_model(
                found, config, make=make, make_experts=make_experts, expert_split=expert_split, facts=facts
            )
    check_all_read(weights)
    text = text_config(config or {}, facts)
    sight = sight_config(config or {}, text.hidden, text.eps)
    making = Making.of(weights, text, make, make_experts, expert_split)
    check_shares(weights, text, making.base, making.head, making.split)
    with weights.use_loader(DefaultWeightsLoader()):
        tower = Tower.load(weights, "model.vision_model", sight.tower)
        features, lead = sight.tower.hidden, "model.connector"
        connector = Connector.load(weights, lead, sight.resampler, features, text.inner, text.activation)
    decoder = load_decoder(weights, text, making)
    tell_unused(weights, str((config or {}).get("model_type")))
    return VisionModel(decoder, tower, connector, sight.image_token)
