"""Rotary position embedding: its config, its frequencies including YaRN's, and the rotation of heads.

Source of YaRN: `modeling_deepseek.py` of DeepSeek-V2 and V3, after "YaRN: Efficient Context Window Extension
of Large Language Models" (arXiv 2309.00071). transformers 5.23.0 computes the same frequencies. Its attention
factor differs for a config with only one of `mscale` and `mscale_all_dim`: DeepSeek's formula, with defaults
of 1 and 0, is kept.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from qload.configs import Excerpt, FoundConfig, validate, value_text
from qload.errors import ArgumentError, ShapeError, checked
from qload.kernels.chips import uncast
from qload.models.families import Family

RopeType = Literal["default", "linear", "llama3", "yarn"]
SECTION_KEYS = ("rope_scaling", "rope_parameters")  # the first non-empty one is read, as in transformers
ORIGINAL_POSITIONS_KEY = "original_max_position_embeddings"
MIN_RAMP_WIDTH = 0.001  # DeepSeek's width of a ramp with equal ends

Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Base = Annotated[float, Field(gt=1, le=1e30, allow_inf_nan=False)]
Length = Annotated[int, Field(ge=1, le=1 << 40)]


@dataclass(frozen=True)
class RopeConfig:
    """Config of rotary position embedding.

    Attributes
    ----------
    type
        "default"; "linear": all frequencies divided by `factor`; "llama3": low ones divided; "yarn".
    theta, dim
        Base of the frequencies; rotated elements of a head.
    pairs
        Whether neighbours (2 j, 2 j + 1) are rotated instead of (j, j + dim / 2).
    factor
        Ratio of the context length to `original`; 1 for "default".
    original
        Number of positions before the context was extended.
    low_freq_factor, high_freq_factor
        Of "llama3": wavelengths above `original / low` are divided, those below `original / high` stay.
    beta_fast, beta_slow, truncate
        Of "yarn": rotations at the two ends of the ramp, and whether the ends are rounded.
    attention_factor, mscale, mscale_all_dim
        Of "yarn": factor of cos and sin, or the two values it is computed from; None if not in the config.
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


class _RopeFields(Excerpt):
    """Rope parameters of a config, within the domains of the formulas."""

    rope_type: RopeType = "default"
    rope_theta: Base
    factor: Positive | None = None
    original_max_position_embeddings: Length | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    truncate: bool = True
    attention_factor: Positive | None = None
    mscale: NonNegative | None = None
    mscale_all_dim: NonNegative | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None


def rope_config(model: FoundConfig, family: Family, dim: int, pairs: bool, positions: int) -> RopeConfig:
    """Read the rope config of a `model` from its config, in the hub's or transformers 5's spelling.

    `dim`: elements of a head, which a `family` with a `rotary_share` rotates in part; `pairs`: whether
    neighbours are rotated; `positions`: the context length. ConfigError names the key of an invalid or
    unsupported value: "dynamic", "longrope" and other types, rope parameters per type of layer, partial
    rotation in a family without.
    """
    section = _rope_section(model, family)
    fields = validate(_RopeFields, section)
    share = fields.partial_rotary_factor
    if share is not None and family.rotary_share is None and share != 1:
        raise section.error("partial_rotary_factor", "1, as heads are rotated whole", f"{share:g}")
    dim = int(dim * (share or 1))
    factor, original = fields.factor, fields.original_max_position_embeddings or positions
    if factor is None and fields.rope_type == "yarn":
        factor = positions / original
    if factor is None and fields.rope_type != "default":
        raise section.error("factor", f"a number, for {fields.rope_type}", "nothing")
    if fields.rope_type == "llama3" and fields.high_freq_factor == fields.low_freq_factor:
        got = f"{fields.high_freq_factor}"
        raise section.error("high_freq_factor", "a number other than low_freq_factor", got)
    if dim < 2 or dim % 2:
        raise model.error("head_dim", "an even number of rotated elements", str(dim))
    return RopeConfig(
        fields.rope_type,
        fields.rope_theta,
        dim,
        pairs,
        1.0 if factor is None or fields.rope_type == "default" else factor,
        original,
        fields.low_freq_factor,
        fields.high_freq_factor,
        fields.beta_fast or 32.0,
        fields.beta_slow or 1.0,
        fields.truncate,
        fields.attention_factor,
        fields.mscale,
        fields.mscale_all_dim,
    )


def _rope_section(model: FoundConfig, family: Family) -> FoundConfig:
    """Return the section with the rope parameters, all of them in one spelling."""
    key = next((key for key in SECTION_KEYS if model.values.get(key)), "")
    section = model.values[key] if key else family.rope
    if not isinstance(section, Mapping):
        raise model.error(key, "an object", value_text(section))
    for name, value in section.items():
        if name.endswith("_attention") and isinstance(value, dict):
            expected, got = "one rope for all layers", "parameters per type of layer"
            raise model.error(f"{key}.{name}", expected, got)
    values = dict(section)
    values.setdefault("rope_type", values.get("type", "default"))
    values.setdefault("rope_theta", model.values.get("rope_theta", family.theta))
    for name, default in (("partial_rotary_factor", family.rotary_share), (ORIGINAL_POSITIONS_KEY, None)):
        value = model.values.get(name, default)
        if value is not None:
            values.setdefault(name, value)
    return FoundConfig(model.file, model.key(key) if key else model.section, values)


class Rope(nn.Module):
    """Rotary position embedding: positions (T,) -> cos and sin, each (T, D / 2), float32; D is `config.dim`.

    The frequencies move with the module; casts of the module leave them in float32.

    Parameters
    ----------
    config
        Rope config of the model.
    device
        Device of the frequencies.
    """

    frequencies: Tensor

    def __init__(self, config: RopeConfig, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config: RopeConfig = config
        self.scale: float = yarn_attention_factor(config) if config.type == "yarn" else 1.0
        frequencies = FREQUENCIES[config.type](config)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of `positions` (T,) times each frequency, multiplied by the type's scale."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool | None = None) -> Tensor:
        """Rotate the heads `x` (T, heads, D) by `cos` and `sin`, in `pairs` or in halves; None: by config.

        Elements from `config.dim` on stay as they are.
        """
        pairs, dim = self.config.pairs if pairs is None else pairs, self.config.dim
        rotate = rotate_pairs if pairs else rotate_halves
        if x.shape[-1] <= dim:
            return rotate(x, cos, sin)
        return torch.cat([rotate(x[..., :dim], cos, sin), x[..., dim:]], -1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(uncast(fn), recurse)  # type: ignore[no-untyped-call]
        return self


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate elements j and j + D / 2 of heads x (T, heads, D): in float32, rounded once to the dtype of x.

    `cos`, `sin`: (T, D / 2). ShapeError for an x of another shape.
    """
    half = cos.shape[-1]
    return _rotate(x, cos, sin, slice(None, half), slice(half, None))


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate elements 2 j and 2 j + 1 of heads x (T, heads, D): in float32, rounded once to the dtype of x.

    `cos`, `sin`: (T, D / 2). ShapeError for an x of another shape.
    """
    return _rotate(x, cos, sin, slice(0, None, 2), slice(1, None, 2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, first: slice, second: slice) -> Tensor:
    T, half = cos.shape
    if x.ndim != 3 or (x.shape[0], x.shape[2]) != (T, 2 * half):
        raise ShapeError("rope: x", f"({T}, heads, {2 * half}) = (T, heads, D)", tuple(x.shape))
    a, b, cos, sin = x[..., first], x[..., second], cos[:, None], sin[:, None]
    rotated = torch.empty_like(x)  # cos and sin make the products float32; the output rounds them
    torch.addcmul(a * cos, b, sin, value=-1, out=rotated[..., first])
    torch.addcmul(b * cos, a, sin, out=rotated[..., second])
    return rotated


def _default_frequencies(config: RopeConfig) -> Tensor:
    """theta ** (-2 j / D) for j = 0, 1, ..., D / 2 - 1: (D / 2,), float32, in radians per position."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    return 1.0 / config.theta**exponents


def _linear_frequencies(config: RopeConfig) -> Tensor:
    return _default_frequencies(config) / config.factor


def _llama3_frequencies(config: RopeConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between."""
    high = _default_frequencies(config)
    rotations = config.original * high / (2 * math.pi)  # within the original context
    low_end, high_end = config.low_freq_factor, config.high_freq_factor
    share = ((rotations - low_end) / (high_end - low_end)).clamp(0, 1)
    return (1 - share) * high / config.factor + share * high


@checked
def yarn_frequencies(config: RopeConfig) -> Tensor:
    """Compute YaRN's radians per position for each pair of rotated elements: (dim / 2,), float32.

    Pairs with more than `beta_fast` rotations within the `original` positions keep their frequency, pairs
    with fewer than `beta_slow` have it divided by `factor`, and a ramp lies between. `truncate`: the ends of
    the ramp are rounded outwards to whole pairs. ArgumentError for a number outside the domain of the
    formula.
    """
    dim, theta, factor, original = config.dim, config.theta, config.factor, config.original
    for name, valid, expected in (
        ("dim", dim >= 2 and dim % 2 == 0, "an even number above 0"),
        ("factor", 0 < factor < math.inf, "a number above 0"),
        ("beta_fast", 0 < config.beta_fast < math.inf, "a number above 0"),
        ("beta_slow", 0 < config.beta_slow < math.inf, "a number above 0"),
        ("theta", 1 < theta < math.inf, "a number above 1"),
        ("original", original >= 1, "1 or more positions"),
    ):
        if not valid:
            raise ArgumentError(name, expected, str(getattr(config, name)))

    def pair_with(rotations: float) -> float:
        """Fractional index of the pair with so many rotations within the original positions."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    powers = theta ** (torch.arange(0, dim, 2).float() / dim)
    low, high = pair_with(config.beta_fast), pair_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / (high - low if high != low else MIN_RAMP_WIDTH)).clamp(0, 1)
    weight = 1 - ramp
    return (1.0 / (factor * powers)) * (1 - weight) + (1.0 / powers) * weight


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Growth of attention at a `factor` times longer context: 0.1 * `weight` * ln(`factor`) + 1.

    1.0 for a `factor` of 1 or less. `weight`: `mscale` or `mscale_all_dim` of a config.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_attention_factor(config: RopeConfig) -> float:
    """Scale of YaRN's cosines and sines: the `attention_factor` of a config, or a quotient of two scales.

    `yarn_mscale` of `mscale` (None: 1), divided by that of `mscale_all_dim` (None: 0).
    """
    if config.attention_factor is not None:
        return config.attention_factor
    mscale, mscale_all_dim = config.mscale, config.mscale_all_dim
    numerator = yarn_mscale(config.factor, 1.0 if mscale is None else mscale)
    return numerator / yarn_mscale(config.factor, 0.0 if mscale_all_dim is None else mscale_all_dim)


FREQUENCIES: Mapping[RopeType, Callable[[RopeConfig], Tensor]] = {
    "default": _default_frequencies,
    "linear": _linear_frequencies,
    "llama3": _llama3_frequencies,
    "yarn": yarn_frequencies,
}
