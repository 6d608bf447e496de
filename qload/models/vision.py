"""Vision-language model Idefics2: a vision tower, and a connector from patches to text embeddings.

    model = load_vision_model(path)
    images = model.images(pixels, pixel_mask)                # (images * vectors of each, H)
    logits = model(ids, step, cache, images)

Tower and connector are loaded by a loader of plain weights, so that neither the checkpoint's quantization nor
a quantizer of the load applies to them. Heads and feed-forward layers are split over the ranks; patches,
positions and norms are replicated.

The images of a batch have one size; `pixel_mask` marks the pixels of an image, the rest is padding on the
right and below. A patch is real if all of its pixels are. Source: `modeling_idefics2.py` of transformers
5.23.0, with `Idefics2VisionTransformer` and `Idefics2Connector`. The same operations are used, as rounding
decides between two positions on their border.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, embedding, layer_norm

from qload.checkpoint import check_all_read
from qload.detect import DefaultWeightsLoader
from qload.errors import ArgumentError, ShapeError, checked
from qload.experts import ExpertFacts, ExpertSplit, GatedActivation
from qload.experts.activation import PLAIN
from qload.loader import Heads
from qload.loader.source import Nonfinite
from qload.methods import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from qload.methods.checkpoint_linear import LinearFactory
from qload.methods.layers import ExpertsFactory
from qload.models.attention import attend_with_bias
from qload.models.config import text_config
from qload.models.decoder import Decoder, load_decoder, open_for_model, warn_unused
from qload.models.feed_forward import GatedFeedForward
from qload.models.kv_cache import PagedCache, Step
from qload.models.norm import Norm, load_tensor
from qload.models.stored_layers import Making, check_matrix, check_shares
from qload.models.vision_config import ResamplerConfig, TowerConfig, vision_config
from qload.parallel import ProcessGroup
from qload.weights import Weights

MAX_SIDE_FRACTION = 1.0 - 1e-6  # the last position on an image's side, from 0 to 1
RESAMPLER_WIDTH_FACTOR = 4  # intermediate size of a resampler layer, by its hidden size


@checked
def real_images(pixels: Tensor, pixel_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Flatten the images of all texts and their mask, without the all-zero images that pad a batch.

    `pixels`: (images, channels, height, width), or (texts, images, channels, height, width). `pixel_mask`: of
    the real pixels, as `pixels` without channels, bool or integers; None: all. Returns the images, and the
    mask as bool (images, height, width). ShapeError for other shapes.
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
    """Mask of the real patches of `patch` x `patch` pixels: (images, rows, columns), bool.

    `pixel_mask`: (images, height, width), bool; pixels beyond the last whole patch are ignored. ShapeError
    for images smaller than a patch.
    """
    if min(pixel_mask.shape[1:]) < patch:
        expected = f"(images, height, width) of at least a patch, {patch} x {patch}"
        raise ShapeError("pixel_mask", expected, tuple(pixel_mask.shape))
    patches = pixel_mask.unfold(1, patch, patch).unfold(2, patch, patch)
    return patches.all(-1).all(-1)


def patch_positions(mask: Tensor, side: int) -> Tensor:
    """Index of each patch's trained position: (images, rows * columns), int64, 0 <= index < `side` ** 2.

    The real rows and columns of an image, by `mask` (images, rows, columns), are spread over the `side` x
    `side` trained positions; padding patches have index 0. ArgumentError for an image without a real patch in
    the first row or the first column.
    """
    counts = mask[:, :, 0].sum(1), mask[:, 0, :].sum(1)
    if any(bool(count.eq(0).any()) for count in counts):
        raise ArgumentError("pixel_mask", "a whole patch at the top and at the left of each image", "none")
    rows, columns = (
        _scale_indices(count, size, side) for count, size in zip(counts, mask.shape[1:], strict=True)
    )
    positions = rows[:, :, None] * side + columns[:, None, :]
    return torch.where(mask, positions, 0).flatten(1)


def _scale_indices(count: Tensor, size: int, side: int) -> Tensor:
    """Scale indices 0 to `size` - 1, of which `count` (images,) are real, to indices below `side`."""
    borders = torch.arange(1 / side, 1.0, 1 / side, device=count.device)
    indices = torch.arange(size, device=count.device, dtype=torch.float32)
    fractions = indices[None, :] * (1.0 / count)[:, None]
    return torch.bucketize(fractions.clamp(max=MAX_SIDE_FRACTION), borders, right=True)


class Tower(nn.Module):
    """Vision tower of this rank's heads: images -> an embedding of each patch.

    Parameters
    ----------
    weights, prefix
        Weights of the model, and the prefix of the tower; ShapeError for other sizes.
    config
        Sizes and activation.
    make
        As in `ReplicatedLinear.load`.
    """

    patches: Tensor
    patch_bias: Tensor
    positions: Tensor

    def __init__(
        self, weights: Weights, prefix: str, config: TowerConfig, make: LinearFactory | None = None
    ) -> None:
        super().__init__()
        self.config: TowerConfig = config
        lead, size = f"{prefix}.embeddings.", config.hidden
        patches = (size, config.channels, config.patch, config.patch)
        self.register_buffer("patches", load_tensor(weights, f"{lead}patch_embedding.weight", patches))
        self.register_buffer("patch_bias", load_tensor(weights, f"{lead}patch_embedding.bias", (size,)))
        positions = load_tensor(weights, f"{lead}position_embedding.weight", (config.side**2, size))
        self.register_buffer("positions", positions)
        names = (f"{prefix}.encoder.layers.{n}" for n in range(config.layers))
        self.layers = nn.ModuleList(TowerLayer(weights, name, config, make) for name in names)
        self.post_layernorm = LayerNorm(weights, f"{prefix}.post_layernorm", size, config.eps)

    def forward(self, pixels: Tensor, mask: Tensor) -> Tensor:
        """Encode `pixels` (images, channels, height, width): (images, rows * columns, hidden).

        `mask`: (images, rows, columns), of the real patches, which alone are attended to.
        """
        if pixels.shape[1] != self.config.channels:
            expected = f"(images, {self.config.channels}, height, width)"
            raise ShapeError("pixels", expected, tuple(pixels.shape))
        x = conv2d(pixels, self.patches, self.patch_bias, self.config.patch).flatten(2).transpose(1, 2)
        x = x + embedding(patch_positions(mask, self.config.side), self.positions)
        bias = key_bias(mask.flatten(1), x.dtype, x.shape[1])
        for layer in self.layers:
            x = layer(x, bias)
        return self.post_layernorm(x)  # type: ignore[no-any-return]


class TowerLayer(nn.Module):
    """Encoder layer: attention and a feed-forward part, each with a norm before it and a residual connection.

    Parameters
    ----------
    weights, prefix
        Weights of the model, and the prefix of the layer.
    config
        Sizes, and the activation between the two matrices of the feed-forward part.
    make
        As in `ReplicatedLinear.load`.
    """

    def __init__(
        self, weights: Weights, prefix: str, config: TowerConfig, make: LinearFactory | None
    ) -> None:
        super().__init__()
        hidden, names = config.hidden, [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        out, widen, narrow = f"{prefix}.self_attn.out_proj", f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"
        check_matrix(weights, names, [hidden] * 3, hidden)
        check_matrix(weights, out, [hidden], hidden)
        check_matrix(weights, widen, [config.inner], hidden)
        check_matrix(weights, narrow, [hidden], config.inner)
        self.layer_norm1, self.layer_norm2 = (
            LayerNorm(weights, f"{prefix}.layer_norm{n}", hidden, config.eps) for n in (1, 2)
        )
        heads = Heads(config.heads, config.heads)
        size = hidden // config.heads
        self.qkv_proj = QKVParallelLinear.load(weights, names, heads, head_size=size, make=make)
        self.out_proj = RowParallelLinear.load(weights, out, make=make)
        self.fc1 = ColumnParallelLinear.load(weights, widen, make=make)
        self.fc2 = RowParallelLinear.load(weights, narrow, make=make)
        self.activation = PLAIN[config.activation.kind]

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Apply the layer to patches x (images, N, hidden); `bias`: additive mask of the scores."""
        size = self.qkv_proj.head_size
        qkv = self.qkv_proj(self.layer_norm1(x))
        q, k, v = (part.unflatten(-1, (-1, size)) for part in qkv.chunk(3, -1))
        x = x + self.out_proj(attend_with_bias(q, k, v, bias, scale=size**-0.5).flatten(2))
        return x + self.fc2(self.activation(self.fc1(self.layer_norm2(x))))  # type: ignore[no-any-return]


class LayerNorm(nn.Module):
    """Layer norm of x (..., H), with a weight (H,) and a bias (H,).

    Parameters
    ----------
    weights, prefix
        Weights of the model, and the prefix of the norm.
    size, eps
        H, with a ShapeError for another size, and the addend of the variance.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weights: Weights, prefix: str, size: int, eps: float) -> None:
        super().__init__()
        self.eps: float = eps
        for name in ("weight", "bias"):
            self.register_buffer(name, load_tensor(weights, f"{prefix}.{name}", (size,)))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., H) along its last dimension."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def key_bias(mask: Tensor, dtype: torch.dtype, queries: int) -> Tensor:
    """Additive mask of scores (images, 1, queries, keys): 0 for keys of `mask` (images, keys), else -inf."""
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return bias[:, None, None].expand(-1, 1, queries, -1)


class Connector(nn.Module):
    """Connector: patches of images -> `config.latents` vectors per image, in the text embedding space.

    Parameters
    ----------
    weights, prefix
        Weights of the model, and the prefix of the connector; ShapeError for other sizes than the config's.
    config
        Sizes of the resampler.
    features
        Hidden size of the tower.
    inner, activation
        Those of the text model, which the projection of the patches shares.
    make
        As in `ReplicatedLinear.load`.
    """

    latents: Tensor

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: ResamplerConfig,
        features: int,
        inner: int,
        activation: GatedActivation,
        make: LinearFactory | None = None,
    ) -> None:
        super().__init__()
        lead, sizes = f"{prefix}.perceiver_resampler", (features, inner, config.hidden)
        self.modality_projection = GatedFeedForward.load(
            weights, f"{prefix}.modality_projection", sizes, activation, make=make
        )
        latents = load_tensor(weights, f"{lead}.latents", (config.latents, config.hidden))
        self.register_buffer("latents", latents)
        names = (f"{lead}.layers.{n}" for n in range(config.depth))
        self.layers = nn.ModuleList(ResamplerLayer(weights, name, config, make) for name in names)
        self.norm = Norm.load(weights, f"{lead}.norm", config.hidden, config.eps)

    def forward(self, patches: Tensor, mask: Tensor) -> Tensor:
        """Resample `patches` (images, N, features) to vectors (images, latents, hidden).

        `mask`: (images, N), of the real patches.
        """
        context = self.modality_projection(patches)
        count = self.latents.shape[0]
        latents_mask = mask.new_ones((mask.shape[0], count))
        bias = key_bias(torch.cat([mask, latents_mask], 1), context.dtype, count)
        x = self.latents.expand(patches.shape[0], -1, -1)
        for layer in self.layers:
            x = layer(x, context, bias)
        return self.norm(x)  # type: ignore[no-any-return]


class ResamplerLayer(nn.Module):
    """Resampler layer: attention from vectors to patches and the vectors themselves, and a feed-forward part.

    Parameters
    ----------
    weights, prefix
        Weights of the model, and the prefix of the layer.
    config
        Sizes and activation.
    make
        As in `ReplicatedLinear.load`.
    """

    def __init__(
        self, weights: Weights, prefix: str, config: ResamplerConfig, make: LinearFactory | None
    ) -> None:
        super().__init__()
        lead, hidden, size = f"{prefix}.self_attn.", config.hidden, config.head_size
        check_matrix(weights, f"{lead}q_proj", [config.heads * size], hidden)
        check_matrix(weights, f"{lead}o_proj", [hidden], config.heads * size)
        for name in ("k_proj", "v_proj"):
            check_matrix(weights, f"{lead}{name}", [config.kv_heads * size], hidden)
        self.k_proj, self.v_proj = (
            ColumnParallelLinear.load(weights, f"{lead}{name}", heads=Heads(keys=config.kv_heads), make=make)
            for name in ("k_proj", "v_proj")
        )
        self.input_latents_norm, self.input_context_norm, self.post_attention_layernorm = (
            Norm.load(weights, f"{prefix}.{name}", hidden, config.eps)
            for name in ("input_latents_norm", "input_context_norm", "post_attention_layernorm")
        )
        heads = Heads(queries=config.heads)
        self.q_proj = ColumnParallelLinear.load(weights, f"{lead}q_proj", heads=heads, make=make)
        self.o_proj = RowParallelLinear.load(weights, f"{lead}o_proj", make=make)
        sizes = (hidden, RESAMPLER_WIDTH_FACTOR * hidden, hidden)
        self.mlp = GatedFeedForward.load(weights, f"{prefix}.mlp", sizes, config.activation, make=make)
        self.head_size = size

    def forward(self, x: Tensor, context: Tensor, bias: Tensor) -> Tensor:
        """Apply the layer to vectors x (images, latents, hidden).

        `context`: (images, N, hidden), the patches; `bias`: (images, 1, latents, N + latents), additive mask
        of the scores.
        """
        latents = self.input_latents_norm(x)
        both = torch.cat([self.input_context_norm(context), latents], 1)
        projected = (self.q_proj(latents), self.k_proj(both), self.v_proj(both))
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in projected)
        x = x + self.o_proj(attend_with_bias(q, k, v, bias, scale=self.head_size**-0.5).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class VisionModel(nn.Module):
    """Vision-language model: a text model with a vision tower and a connector, or one rank's share of them.

    Parameters
    ----------
    text
        Text model.
    tower, connector
        Vision tower, and the connector into the text embedding space.
    image_token
        Id of the placeholder token of an image's vectors.
    """

    def __init__(self, text: Decoder, tower: Tower, connector: Connector, image_token: int) -> None:
        super().__init__()
        self.text, self.tower, self.connector = text, tower, connector
        self.image_token: int = image_token

    def images(self, pixels: Tensor, pixel_mask: Tensor | None = None) -> Tensor:
        """Encode images to text embeddings, one image after another: (images * latents, H).

        `pixels`: ([texts,] images, channels, height, width), floats; all-zero images are padding and dropped.
        `pixel_mask`: ([texts,] images, height, width), of the real pixels; None: all. ShapeError for other
        shapes, and ArgumentError for an image without a real patch.
        """
        pixels, real = real_images(pixels, pixel_mask)
        if not len(pixels):
            return self.connector.latents[:0]
        mask = patch_mask(real, self.tower.config.patch)
        patches = self.tower(pixels.to(self.tower.patches), mask)
        return self.connector(patches, mask.flatten(1)).flatten(0, 1)  # type: ignore[no-any-return]

    def embed(self, ids: Tensor, images: Tensor | None = None) -> Tensor:
        """Embed the token `ids` (T,), with `images` (vectors, H) in place of the image tokens: (T, H).

        ShapeError for another number of image tokens than vectors. `images` None: they are ordinary tokens.
        """
        x = self.text.embed(ids)
        if images is None:
            return x
        places = (ids == self.image_token).nonzero().squeeze(1)
        if (len(places), x.shape[1]) != tuple(images.shape):
            expected = f"({len(places)}, {x.shape[1]}), one vector per image token of the text"
            raise ShapeError("images", expected, tuple(images.shape))
        return x.index_copy(0, places, images.to(x))

    def forward(self, ids: Tensor, step: Step, cache: PagedCache, images: Tensor | None = None) -> Tensor:
        """Compute the logits (T, vocab) of token `ids` (T,) of a `step`; keys and values go to `cache`.

        `images`: as in `embed`, for the new tokens.
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
    make_vision: LinearFactory | None = None,
    expert_split: ExpertSplit | None = "tensor",
    facts: ExpertFacts | None = None,
    nonfinite: Nonfinite = "error",
) -> VisionModel:
    """Load the vision-language model of a checkpoint, or this rank's share of it.

    The text model may be stored in any format, or be quantized while it is loaded; tower and connector stay
    plain. All parameters are those of `load_model`; the `config` is not changed.

    Parameters
    ----------
    weights, config
        A path, or open tensors and the whole `config.json`, which is then required.
    device, dtype, process_group, nonfinite
        For a path.
    make, make_experts, expert_split, facts
        For the text model.
    make_vision
        As `make`, for the tower and the connector.

    Raises
    ------
    ConfigError
        For a model type without vision, with a list of the supported ones, and for invalid values.
    MissingTensorError, ShapeError
        For a tensor of the config that is missing, or that has another shape.
    CutError, DivideError
        For a layer that cannot be split over the ranks.
    """
    with open_for_model(weights, config, device, dtype, process_group, facts, nonfinite) as (opened, values):
        check_all_read(opened)
        text = text_config(values, facts)
        vision = vision_config(values, text.hidden, text.eps)
        making = Making.of(opened, text, make, make_experts, expert_split)
        check_shares(opened, text, making.base, making.head, making.split)
        with opened.use_loader(DefaultWeightsLoader()):
            tower = Tower(opened, "model.vision_model", vision.tower, make_vision)
            sizes = (vision.tower.hidden, text.inner, text.activation)
            connector = Connector(opened, "model.connector", vision.resampler, *sizes, make_vision)
        decoder = load_decoder(opened, text, making)
        warn_unused(opened, str(values.get("model_type")))
        return VisionModel(decoder, tower, connector, vision.image_token)
