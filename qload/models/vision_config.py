"""Config of Idefics2's vision parts, validated from `config.json`.

Keys and defaults are those of transformers 5.23.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from qload.configs import Excerpt, FoundConfig, validate, value_text
from qload.detect.config_reader import MODEL_CONFIG
from qload.errors import ConfigError, checked
from qload.experts import GatedActivation
from qload.models.config import read_activation

TYPES = ("idefics2",)
MAX_SIZE = 1 << 20
MAX_LAYERS = 1 << 12

Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Count = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class TowerConfig:
    """Config of a vision tower.

    Attributes
    ----------
    hidden, inner, layers, heads
        Hidden size, intermediate size, number of layers, and of attention heads.
    channels, patch, side
        Color channels, side of a patch in pixels, and side of an image in patches at the trained size.
    activation
        Activation of feed-forward layers, as a function of one operand.
    eps
        Epsilon of norms.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    channels: int
    patch: int
    side: int
    activation: GatedActivation
    eps: float


@dataclass(frozen=True)
class ResamplerConfig:
    """Config of a resampler from the patches of an image to a fixed number of vectors.

    Attributes
    ----------
    hidden
        Hidden size, that of the text model.
    latents, depth
        Number of vectors per image, and of layers.
    heads, kv_heads, head_size
        Heads of queries, heads of keys and values, and elements of a head.
    activation, eps
        Activation of feed-forward layers; epsilon of norms.
    """

    hidden: int
    latents: int
    depth: int
    heads: int
    kv_heads: int
    head_size: int
    activation: GatedActivation
    eps: float


@dataclass(frozen=True)
class VisionConfig:
    """Config of a vision-language model's vision parts.

    Attributes
    ----------
    tower, resampler
        Configs of the two parts.
    image_token
        Id of the placeholder token of an image's vectors.
    """

    tower: TowerConfig
    resampler: ResamplerConfig
    image_token: int


class _ModelFields(Excerpt):
    image_token_id: Annotated[int, Field(ge=0)] = 32001


class _TowerFields(Excerpt):
    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Count = 12
    num_attention_heads: Count = 12
    num_channels: Count = 3
    image_size: Size = 224
    patch_size: Size = 32
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: Fraction = 1e-6


class _ResamplerFields(Excerpt):
    hidden_act: str = "silu"
    hidden_size: Size = 4096
    rms_norm_eps: Fraction = 1e-6
    resampler_n_latents: Size = 64
    resampler_depth: Count = 3
    resampler_n_heads: Count = 16
    resampler_head_dim: Size = 96
    num_key_value_heads: Count = 4


@checked
def vision_config(config: Mapping[str, Any], hidden: int, eps: float) -> VisionConfig:
    """Read the vision config from a whole `config`, a `config.json`, which is not changed.

    `hidden` and `eps` are the text model's; a resampler with another hidden size in its config has these, as
    in transformers. ConfigError names the key of a model type without vision, and of an invalid value.
    """
    if config.get("model_type") not in TYPES:
        expected = f"a type with vision: {', '.join(TYPES)}"
        raise ConfigError(MODEL_CONFIG, "model_type", expected, value_text(config.get("model_type")))
    fields = validate(_ModelFields, FoundConfig(MODEL_CONFIG, "", config))
    tower = _tower_config(_section(config, "vision_config"))
    return VisionConfig(tower, _resampler_config(config, hidden, eps), fields.image_token_id)


def _tower_config(section: FoundConfig) -> TowerConfig:
    fields = validate(_TowerFields, section)
    hidden, heads = fields.hidden_size, fields.num_attention_heads
    if hidden % heads:
        raise section.error("num_attention_heads", f"a divisor of hidden_size = {hidden}", str(heads))
    if fields.image_size < fields.patch_size:
        expected = f"at least patch_size = {fields.patch_size}"
        raise section.error("image_size", expected, str(fields.image_size))
    return TowerConfig(
        hidden=hidden,
        inner=fields.intermediate_size,
        layers=fields.num_hidden_layers,
        heads=heads,
        channels=fields.num_channels,
        patch=fields.patch_size,
        side=fields.image_size // fields.patch_size,
        activation=read_activation(section, fields.hidden_act),
        eps=fields.layer_norm_eps,
    )


def _resampler_config(config: Mapping[str, Any], hidden: int, eps: float) -> ResamplerConfig:
    section = _section(config, "perceiver_config")
    fields = validate(_ResamplerFields, section)
    heads, kv_heads = fields.resampler_n_heads, fields.num_key_value_heads
    if heads % kv_heads:
        raise section.error("num_key_value_heads", f"a divisor of resampler_n_heads = {heads}", str(kv_heads))
    return ResamplerConfig(
        hidden=hidden,
        latents=fields.resampler_n_latents,
        depth=fields.resampler_depth,
        heads=heads,
        kv_heads=kv_heads,
        head_size=fields.resampler_head_dim,
        activation=read_activation(section, fields.hidden_act),
        eps=fields.rms_norm_eps if fields.hidden_size == hidden else eps,
    )


def _section(config: Mapping[str, Any], name: str) -> FoundConfig:
    values = config.get(name)
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(MODEL_CONFIG, name, "an object", value_text(values))
    return FoundConfig(MODEL_CONFIG, name, values or {})
