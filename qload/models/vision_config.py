"""What a model's config says of how it sees, as hostile input: Idefics2.

Keys and defaults are those of transformers 5.23.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from qload.detect.files import MODEL_CONFIG, FoundConfig, shown
from qload.detect.validation import Excerpt, validate
from qload.errors import ConfigError, checked
from qload.experts import GatedActivation
from qload.experts.facts import ACTIVATIONS

TYPES = ("idefics2",)
LARGEST = 1 << 20  # a size beyond is not believed
LAYERS = 1 << 12

Size = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=LAYERS)]
Small = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class TowerConfig:
    """A vision tower: patches of an image, and layers in which all of an image's patches see each other.

    Attributes
    ----------
    hidden, inner, layers, heads
        The length of a patch's vector, what lies between in a feed-forward layer, and how many of each.
    channels, patch, side
        Colours of a pixel, pixels of a patch's side, and patches of the side of an image of the size that
        the tower was trained on.
    activation
        Of feed-forward layers; its function of one operand is meant.
    eps
        What norms add to a variance.
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
    """What makes a fixed number of vectors of an image's patches.

    Attributes
    ----------
    hidden
        The length of a vector, which is the text model's.
    latents, depth
        How many vectors an image becomes, and in how many layers.
    heads, kv_heads, head_size
        Heads of queries, of keys and values, and their elements.
    activation, eps
        Of feed-forward layers; what norms add to a mean square.
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
class SightConfig:
    """How a model sees: its tower, its resampler, and the word that stands for a vector of an image.

    Attributes
    ----------
    tower, resampler
        The two parts.
    image_token
        The id of the word in whose places an image's vectors are put.
    """

    tower: TowerConfig
    resampler: ResamplerConfig
    image_token: int


class _Whole(Excerpt):
    image_token_id: Annotated[int, Field(ge=0)] = 32001


class _Tower(Excerpt):
    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Count = 12
    num_attention_heads: Count = 12
    num_channels: Count = 3
    image_size: Size = 224
    patch_size: Size = 32
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: Small = 1e-6


class _Resampler(Excerpt):
    hidden_act: str = "silu"
    hidden_size: Size = 4096
    rms_norm_eps: Small = 1e-6
    resampler_n_latents: Size = 64
    resampler_depth: Count = 3
    resampler_n_heads: Count = 16
    resampler_head_dim: Size = 96
    num_key_value_heads: Count = 4


@checked
def sight_config(config: Mapping[str, Any], hidden: int, eps: float) -> SightConfig:
    """How the model of a whole `config`, a `config.json`, sees; it stays as it is.

    `hidden` and `eps` are the text model's; a resampler that says another length has these, as its owner has
    it. ConfigError names the key for a type that does not see, and for what cannot be believed.
    """
    if config.get("model_type") not in TYPES:
        expected = f"a type that sees: {', '.join(TYPES)}"
        raise ConfigError(MODEL_CONFIG, "model_type", expected, shown(config.get("model_type")))
    whole, found = validate(_Whole, FoundConfig(MODEL_CONFIG, "", config)), _section(config, "vision_config")
    return SightConfig(_tower(found), _resampler(config, hidden, eps), whole.image_token_id)


def _tower(found: FoundConfig) -> TowerConfig:
    said = validate(_Tower, found)
    if said.hidden_size % said.num_attention_heads:
        expected = f"a divisor of hidden_size = {said.hidden_size}"
        raise ConfigError(
            found.file, found.key("num_attention_heads"), expected, str(said.num_attention_heads)
        )
    if said.image_size < said.patch_size:
        expected = f"at least patch_size = {said.patch_size}"
        raise ConfigError(found.file, found.key("image_size"), expected, str(said.image_size))
    return TowerConfig(
        hidden=said.hidden_size,
        inner=said.intermediate_size,
        layers=said.num_hidden_layers,
        heads=said.num_attention_heads,
        channels=said.num_channels,
        patch=said.patch_size,
        side=said.image_size // said.patch_size,
        activation=_activation(found, said.hidden_act),
        eps=said.layer_norm_eps,
    )


def _resampler(config: Mapping[str, Any], hidden: int, eps: float) -> ResamplerConfig:
    found = _section(config, "perceiver_config")
    said = validate(_Resampler, found)
    if said.resampler_n_heads % said.num_key_value_heads:
        expected = f"a divisor of resampler_n_heads = {said.resampler_n_heads}"
        raise ConfigError(
            found.file, found.key("num_key_value_heads"), expected, str(said.num_key_value_heads)
        )
    return ResamplerConfig(
        hidden=hidden,
        latents=said.resampler_n_latents,
        depth=said.resampler_depth,
        heads=said.resampler_n_heads,
        kv_heads=said.num_key_value_heads,
        head_size=said.resampler_head_dim,
        activation=_activation(found, said.hidden_act),
        eps=said.rms_norm_eps if said.hidden_size == hidden else eps,
    )


def _section(config: Mapping[str, Any], name: str) -> FoundConfig:
    values = config.get(name)
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(MODEL_CONFIG, name, "an object", shown(values))
    return FoundConfig(MODEL_CONFIG, name, values or {})


def _activation(found: FoundConfig, name: str) -> GatedActivation:
    known = ACTIVATIONS.get(name)
    if known is None:
        raise ConfigError(
            found.file, found.key("hidden_act"), f"one of {', '.join(ACTIVATIONS)}", shown(name)
        )
    return known
