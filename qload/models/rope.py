"""Rotary positions: cos and sin of every position, and the two ways in which a head is turned by them."""

import math
from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from qload.errors import ShapeError
from qload.kernels.chips import uncast
from qload.models.rope_config import RopeConfig, RopeType
from qload.models.yarn import yarn_frequencies, yarn_magnitude


class Rope(nn.Module):
    """Positions (T,) -> cos and sin, each (T, D / 2), float32; D is `config.dim`.

    Moving the module moves its frequencies, which no cast rounds.

    Parameters
    ----------
    config
        What the model's config says.
    device
        Where the frequencies lie.
    """

    frequencies: Tensor

    def __init__(self, config: RopeConfig, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config: RopeConfig = config
        frequencies, self.scale = FREQUENCIES[config.type](config)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin of `positions` (T,) times each frequency, both multiplied by the type's scale."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scale == 1 else (cos * self.scale, sin * self.scale)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The heads `x` (T, heads, D), turned by `cos` and `sin` as this model does."""
        return (rotate_pairs if self.config.pairs else rotate_halves)(x, cos, sin)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(uncast(fn), recurse)  # type: ignore[no-untyped-call]
        return self


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x (T, heads, D), of which number j turns with number j + D / 2: in float32, rounded once.

    `cos`, `sin`: (T, D / 2). ShapeError for an x of another size.
    """
    _check(x, cos)
    turned = torch.empty_like(x)
    half = x.shape[-1] // 2
    _turn(x[..., :half], x[..., half:], cos, sin, turned[..., :half], turned[..., half:])
    return turned


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x (T, heads, D), of which number 2 j turns with number 2 j + 1: in float32, rounded once.

    `cos`, `sin`: (T, D / 2). ShapeError for an x of another size.
    """
    _check(x, cos)
    turned = torch.empty_like(x)
    _turn(x[..., 0::2], x[..., 1::2], cos, sin, turned[..., 0::2], turned[..., 1::2])
    return turned


def _turn(
    first: Tensor, second: Tensor, cos: Tensor, sin: Tensor, to_first: Tensor, to_second: Tensor
) -> None:
    cos, sin = cos[:, None], sin[:, None]
    torch.addcmul(first * cos, second, sin, value=-1, out=to_first)  # float32, as cos is, and rounded here
    torch.addcmul(second * cos, first, sin, out=to_second)


def _check(x: Tensor, cos: Tensor) -> None:
    T, half = cos.shape
    if x.ndim != 3 or (x.shape[0], x.shape[2]) != (T, 2 * half):
        raise ShapeError("rope: x", f"({T}, heads, {2 * half}) = (T, heads, D)", tuple(x.shape))


def plain_frequencies(config: RopeConfig) -> Tensor:
    """theta ** (-2 j / D) for j = 0, 1, ..., D / 2 - 1: (D / 2,), float32."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    return 1.0 / config.theta**exponents


def _default(config: RopeConfig) -> tuple[Tensor, float]:
    return plain_frequencies(config), 1.0


def _linear(config: RopeConfig) -> tuple[Tensor, float]:
    return plain_frequencies(config) / config.factor, 1.0


def _llama3(config: RopeConfig) -> tuple[Tensor, float]:
    """Long waves are slowed down by the factor, short ones stay, and those between are mixed."""
    fast = plain_frequencies(config)
    turns = config.original * fast / (2 * math.pi)  # how often a frequency turns within the original context
    low, high = config.low_freq_factor, config.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * fast / config.factor + share * fast, 1.0


def _yarn(config: RopeConfig) -> tuple[Tensor, float]:
    frequencies = yarn_frequencies(
        config.dim,
        config.theta,
        config.factor,
        config.original,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        truncate=config.truncate,
    )
    scales = (config.mscale, config.mscale_all_dim, config.attention_factor)
    return frequencies, yarn_magnitude(config.factor, *scales)


FREQUENCIES: Mapping[RopeType, Callable[[RopeConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
