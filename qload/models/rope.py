"""Rotary positions: cos and sin of every position, and the two ways in which a head is turned by them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from qload.detect import FoundConfig
from qload.detect.files import shown
from qload.detect.validation import Excerpt, validate
from qload.errors import ArgumentError, ConfigError, ShapeError, checked
from qload.kernels.chips import uncast
from qload.models.families import Family

RopeType = Literal["default", "linear", "llama3", "yarn"]
PLACES = ("rope_scaling", "rope_parameters")  # the first that says anything counts, as in transformers
ORIGINAL = "original_max_position_embeddings"

Above0 = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Base = Annotated[float, Field(gt=1, le=1e30, allow_inf_nan=False)]
Length = Annotated[int, Field(ge=1, le=1 << 40)]


@dataclass(frozen=True)
class RopeConfig:
    """Frequencies of rotary positions, as a config says them.

    Attributes
    ----------
    type
        "default"; "linear": all divided by `factor`; "llama3": the slow ones divided; "yarn".
    theta, dim
        The base, and how many numbers of a head are turned.
    pairs
        Whether neighbours (2 j, 2 j + 1) are turned, and not (j, j + dim / 2).
    factor
        How many times longer the context became; 1 for "default".
    original
        The positions before that.
    low_freq_factor, high_freq_factor
        Of "llama3": wavelengths above `original / low` are divided, those below `original / high` stay.
    beta_fast, beta_slow, truncate
        Of "yarn": the rotations between which frequencies are mixed, and whether the ends are rounded.
    attention_factor, mscale, mscale_all_dim
        Of "yarn": what cos and sin are multiplied by, or what it follows from; None where nothing is said.
    """

    type: RopeType
    theta: float
    dim: int
    pairs: bool = False
    factor: float = 1.0
    original: int = 1
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


class _Said(Excerpt):
    """The parameters as a config has them; numbers that are no use to a formula are refused."""

    rope_type: RopeType = "default"
    rope_theta: Base
    factor: Above0 | None = None
    original_max_position_embeddings: Length | None = None
    low_freq_factor: Above0 = 1.0
    high_freq_factor: Above0 = 4.0
    beta_fast: Above0 | None = None
    beta_slow: Above0 | None = None
    truncate: bool = True
    attention_factor: Above0 | None = None
    mscale: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None
    partial_rotary_factor: Annotated[float, Field(ge=1, le=1)] | None = None


def rope_config(found: FoundConfig, family: Family, dim: int, pairs: bool, positions: int) -> RopeConfig:
    """The rope of a model of a `family`, whose heads have `dim` numbers to turn, up to so many `positions`.

    `found`: the model's own config; `pairs`: whether neighbours are turned. ConfigError names the key for
    what is not known or no formula can take: "dynamic", "longrope" and other types, another rope for each
    type of layer, a part of each head.
    """
    place, values = _values(found, family)
    within = FoundConfig(found.file, found.key(place) if place else found.section, values)
    said = validate(_Said, within)
    factor, original = said.factor, said.original_max_position_embeddings or positions
    if factor is None and said.rope_type == "yarn":
        factor = positions / original
    if factor is None and said.rope_type != "default":
        raise ConfigError(within.file, within.key("factor"), f"a number, for {said.rope_type}", "nothing")
    if said.rope_type == "llama3" and said.high_freq_factor == said.low_freq_factor:
        name = within.key("high_freq_factor")
        raise ConfigError(
            within.file, name, "another number than low_freq_factor", f"{said.high_freq_factor}"
        )
    if dim < 2 or dim % 2:
        raise ConfigError(found.file, found.key("head_dim"), "an even number to turn", str(dim))
    return RopeConfig(
        said.rope_type,
        said.rope_theta,
        dim,
        pairs,
        1.0 if factor is None or said.rope_type == "default" else factor,
        original,
        said.low_freq_factor,
        said.high_freq_factor,
        said.beta_fast or 32.0,
        said.beta_slow or 1.0,
        said.truncate,
        said.attention_factor,
        said.mscale,
        said.mscale_all_dim,
    )


def _values(found: FoundConfig, family: Family) -> tuple[str, Mapping[str, Any]]:
    """The key under which parameters stand, and all of them in one spelling."""
    place = next((key for key in PLACES if found.values.get(key)), "")
    held = found.values[place] if place else family.rope
    if not isinstance(held, Mapping):
        raise ConfigError(found.file, found.key(place), "an object", shown(held))
    values = dict(held)
    for key in values:
        if key.endswith("_attention") and isinstance(values[key], dict):
            name = f"{found.key(place)}.{key}"
            raise ConfigError(found.file, name, "one rope for all layers", "another for each type of layer")
    values.setdefault("rope_type", values.get("type", "default"))
    values.setdefault("rope_theta", found.values.get("rope_theta", family.theta))
    for key in ("partial_rotary_factor", ORIGINAL):
        if found.values.get(key) is not None:
            values.setdefault(key, found.values[key])
    return place, values


MIN_RAMP_WIDTH = 0.001  # what the owner puts between two ends of a ramp that are one


@checked
def yarn_frequencies(
    size: int,
    theta: float,
    factor: float,
    original: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """Radians a position, of each pair of a head's `size` rotated elements: (size / 2,), float32.

    Pairs that turn more than `beta_fast` times within the `original` positions keep their frequency, those
    that turn less than `beta_slow` times have it divided by `factor`, and a ramp lies between. ArgumentError
    for a number that the formula has no value for.

    Parameters
    ----------
    size
        How many elements of a head are rotated; even.
    theta
        The base of the frequencies: `rope_theta`.
    factor
        How many times longer the context is.
    original
        `original_max_position_embeddings`: the positions of the first training.
    beta_fast, beta_slow
        Turns within `original` positions, at the two ends of the ramp.
    truncate
        Whether the ends of the ramp are rounded to whole pairs, outwards.
    device
        Where the result is made; None: torch's default.
    """
    _refuse(size < 2 or size % 2, "size", "an even number above 0", size)
    for name, number in (("factor", factor), ("beta_fast", beta_fast), ("beta_slow", beta_slow)):
        _refuse(not 0 < number < math.inf, name, "a number above 0", number)
    _refuse(not 1 < theta < math.inf, "theta", "a number above 1", theta)
    _refuse(original < 1, "original", "1 or more positions", original)

    powers = theta ** (torch.arange(0, size, 2, device=device).float() / size)
    low, high = (_pair(turns, size, theta, original) for turns in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    pairs = torch.arange(size // 2, device=device, dtype=torch.float32)
    ramp = ((pairs - low) / (high - low if high != low else MIN_RAMP_WIDTH)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def magnitude(factor: float, weight: float = 1.0) -> float:
    """What attention grows by at a `factor` times longer context: 0.1 * `weight` * ln(`factor`) + 1.

    1.0 for a `factor` of 1 or less. `weight`: `mscale` or `mscale_all_dim` of a config.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_magnitude(
    factor: float,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
) -> float:
    """What cosines and sines are multiplied by, or the `attention_factor` that a config gives.

    The `magnitude` of `factor` and `mscale` (None: 1) by that of `factor` and `mscale_all_dim` (None: 0).
    """
    if attention_factor is not None:
        return attention_factor
    above = magnitude(factor, 1.0 if mscale is None else mscale)
    return above / magnitude(factor, 0.0 if mscale_all_dim is None else mscale_all_dim)


def softmax_scale(head_size: int, factor: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What scores of queries and keys are multiplied by in DeepSeek V2 and V3.

    1 / sqrt(`head_size`), of the sum of both parts of a head, not of a padded one; times the square of the
    `magnitude` of yarn's `factor` and `mscale_all_dim`. None: no yarn, or a config that has no such key.
    """
    grown = 1.0 if factor is None else magnitude(factor, mscale_all_dim or 0.0)
    return math.pow(head_size, -0.5) * grown * grown


def _pair(turns: float, size: int, theta: float, original: int) -> float:
    """Which pair, counted with a fraction, turns so often within the original positions."""
    return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _refuse(wrong: Any, name: str, expected: str, got: object) -> None:
    if wrong:
        raise ArgumentError(name, expected, str(got))


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
    _check_heads(x, cos)
    turned = torch.empty_like(x)
    half = x.shape[-1] // 2
    _turn(x[..., :half], x[..., half:], cos, sin, turned[..., :half], turned[..., half:])
    return turned


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x (T, heads, D), of which number 2 j turns with number 2 j + 1: in float32, rounded once.

    `cos`, `sin`: (T, D / 2). ShapeError for an x of another size.
    """
    _check_heads(x, cos)
    turned = torch.empty_like(x)
    _turn(x[..., 0::2], x[..., 1::2], cos, sin, turned[..., 0::2], turned[..., 1::2])
    return turned


def _turn(
    first: Tensor, second: Tensor, cos: Tensor, sin: Tensor, to_first: Tensor, to_second: Tensor
) -> None:
    cos, sin = cos[:, None], sin[:, None]
    torch.addcmul(first * cos, second, sin, value=-1, out=to_first)  # float32, as cos is, and rounded here
    torch.addcmul(second * cos, first, sin, out=to_second)


def _check_heads(x: Tensor, cos: Tensor) -> None:
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
