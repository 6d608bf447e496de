"""How a config says that positions turn queries and keys, in the hub's spelling and in transformers 5's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from qload.detect import FoundConfig
from qload.detect.files import shown
from qload.detect.validation import Excerpt, validate
from qload.errors import ConfigError
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
