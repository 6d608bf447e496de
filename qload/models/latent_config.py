"""What a model's config says of latent attention, as hostile input: DeepSeek V2 and V3.

Keys and defaults are those of transformers 5.23.0. `head_dim`, which its configs repeat, is the size of the
rotated part alone, and no size of a head; it is not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from qload.architecture import architecture_of
from qload.detect.files import MODEL_CONFIG, FoundConfig
from qload.detect.validation import Excerpt, validate
from qload.errors import ArgumentError, check_fields, checked

LARGEST = 1 << 20  # elements of a vector; a size beyond is not believed
Size = Annotated[int, Field(ge=1, le=LARGEST)]
TYPES = ("deepseek_v2", "deepseek_v3")


@dataclass(frozen=True)
class LatentConfig:
    """The sizes of multi-head latent attention, whose keys and values follow from one vector of a token.

    ArgumentError for a size below 1, and for an odd number of rotated elements.

    Attributes
    ----------
    q_rank, kv_rank
        `q_lora_rank`, how long the vector is that queries follow from, None where they follow from the
        token itself; `kv_lora_rank`, how long the one of keys and values is.
    nope_size, rope_size, value_size
        Elements of a head: those of queries and keys that are not rotated, those that are (of keys, one part
        for all heads), and those of values.
    interleaved
        Whether rotated elements are stored in pairs, (0, 1), (2, 3) and so on; else in halves.
    """

    q_rank: int | None
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int
    interleaved: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("q_rank", "kv_rank", "nope_size", "rope_size", "value_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ArgumentError(name, "1 or more", str(size))
        if self.rope_size % 2:
            raise ArgumentError("rope_size", "an even number", str(self.rope_size))

    @property
    def key_size(self) -> int:
        """Elements of a head of queries or keys, both parts: what the cache of keys has."""
        return self.nope_size + self.rope_size


class _Latent(Excerpt):
    q_lora_rank: Size | None = 1536
    kv_lora_rank: Size = 512
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Annotated[Size, Field(multiple_of=2)] = 64
    v_head_dim: Size = 128
    rope_interleave: bool | None = True


@checked
def latent_config(config: Mapping[str, Any]) -> LatentConfig | None:
    """The sizes of the latent attention that a model's `config` describes; None for a model without it.

    `config`: the whole `config.json`; of a model that sees or hears too, its text model is meant.
    ConfigError names the key of a size that is none.
    """
    model = architecture_of(config)
    if model is None or model.type not in TYPES:
        return None
    inner = next((key for key, held in config.items() if held is model.config), "")
    said = validate(_Latent, FoundConfig(MODEL_CONFIG, inner, model.config))
    return LatentConfig(
        said.q_lora_rank,
        said.kv_lora_rank,
        said.qk_nope_head_dim,
        said.qk_rope_head_dim,
        said.v_head_dim,
        model.type == "deepseek_v2" or bool(said.rope_interleave),
    )
