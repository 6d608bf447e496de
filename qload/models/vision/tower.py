"""A vision tower: patches of images become vectors, and all patches of an image see each other.

Heads and feed-forward layers are shared by the ranks; patches, positions and norms are whole on each of them.
Source: `Idefics2VisionTransformer` of transformers 5.23.0.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, embedding, layer_norm

from qload.errors import ShapeError
from qload.experts.gated import PLAIN, GatedActivation
from qload.loader import Heads
from qload.methods import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from qload.models.attention import attend_hidden
from qload.models.norm import vector
from qload.models.shapes import check_matrix
from qload.models.vision.config import TowerConfig
from qload.models.vision.patches import patch_positions
from qload.weights import Weights


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
