"""Configs of text models: sizes, attention masks and latent attention, validated from `config.json`.

Keys and defaults are those of transformers 5.23.0, in the hub's spelling as well. Keys that a type's own code
does not read are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field

from qload.architecture import Architecture, architecture_of
from qload.architecture.config import INNER
from qload.detect import FoundConfig
from qload.detect.files import MODEL_CONFIG, shown
from qload.detect.validation import Excerpt, validate
from qload.errors import ArgumentError, ConfigError, check_fields, checked
from qload.experts import ExpertFacts, GatedActivation, Routing, routing_of
from qload.experts.facts import ACTIVATIONS, facts_of
from qload.models.families import FAMILIES, Family
from qload.models.rope import RopeConfig, rope_config

MAX_VECTOR_SIZE = 1 << 20  # elements of a vector; a size beyond is not believed
Size = Annotated[int, Field(ge=1, le=MAX_VECTOR_SIZE)]
LATENT_TYPES = ("deepseek_v2", "deepseek_v3")


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
    if model is None or model.type not in LATENT_TYPES:
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


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class Mask:
    """What a layer's tokens see.

    Attributes
    ----------
    window
        A token at i sees j where i - window < j <= i; None: no window.
    chunk
        A token at i sees j <= i of its own chunk, i // chunk == j // chunk; None: no chunks.
    turned
        Whether positions turn the queries and keys of the layer.
    """

    window: int | None = None
    chunk: int | None = None
    turned: bool = True


Count = Annotated[int, Field(ge=1, le=1 << 40)]
Places = Annotated[int, Field(ge=1, le=1 << 31)]
Small = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]

LAYERS = 4096  # a model of more is not believed: what each layer does is held in memory
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
HEAD = (
    1 << 16
)  # numbers of a head; a head of more is not believed: its frequencies are made before it is read
FIRST = "model.layers.0."


class Said(Excerpt):
    """What configs of all types may say beside the sizes of `qload.architecture`."""

    rms_norm_eps: Small
    max_position_embeddings: Places
    eos_token_id: int | list[int] | None
    hidden_act: str = "silu"
    dtype: str | None = None
    torch_dtype: str | None = None
    sliding_window: Places | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    attention_chunk_size: Places | None = 8192
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Places = 4
    use_qk_norm: bool = True
    attn_temperature_tuning: bool | int = True  # published files have 4, which is a yes
    floor_scale: Number = 8192.0
    attn_scale: Number = 0.1


@dataclass(frozen=True)
class TextConfig:
    """What a text model is, as its config says; see `text_config`.

    Attributes
    ----------
    type
        The `model_type` whose row of `qload.models.families` this is.
    architecture
        The names and sizes of its tensors.
    hidden, layers, vocab
        H, how many decoder layers, and how many words.
    heads, kv_heads, head_dim, v_head_dim
        Heads of queries, and of keys and values; numbers of a head of queries and keys, and of values.
    inner, expert_inner, shared_inner
        What lies between in a dense layer, in an expert, and in the expert of all tokens; 0: there is none.
    eps, positions
        What norms add to a variance; how many positions the model was made for.
    activation
        What gate and up of a dense layer become.
    tied
        Whether the head is the embedding.
    rope
        How positions turn queries and keys.
    biases
        The matrices of a layer that have a bias, by the last part of their names.
    head_norm
        "none"; "before rope", with a weight; "after rope", without.
    masks
        Of each layer: what its tokens see, and whether positions turn it.
    sinks
        Whether each head has a sink.
    temperature
        Of layers without rope, floor and scale of Llama 4's temperature; None: none.
    routing, facts
        How routers choose, and what experts do between their matrices; None where no layer has experts.
    sparse_layers
        The layers that have experts.
    latent
        The sizes of latent attention; None: attention has none.
    eos
        The words that end a text.
    dtype
        What the config says the floats are; None where it says nothing that is known.
    """

    type: str
    architecture: Architecture
    hidden: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    inner: int
    expert_inner: int
    shared_inner: int
    eps: float
    positions: int
    activation: GatedActivation
    tied: bool
    rope: RopeConfig
    biases: frozenset[str]
    head_norm: str
    masks: tuple[Mask, ...]
    sinks: bool
    temperature: tuple[float, float] | None
    routing: Routing | None
    facts: ExpertFacts | None
    sparse_layers: frozenset[int]
    latent: LatentConfig | None
    eos: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def family(self) -> Family:
        """What this type does between its matrices."""
        return FAMILIES[self.type]

    def sparse(self, layer: int) -> bool:
        """Whether the decoder layer `layer` has experts."""
        return layer in self.sparse_layers


@checked
def text_config(config: Mapping[str, Any], facts: ExpertFacts | None = None) -> TextConfig:
    """What a model's `config.json` says of its text model, by `model_type`.

    `config`: the whole file, which stays as it is. `facts`: what its experts do between their matrices; None:
    as the file says. ConfigError names the key for a type that there is no model of, and for what cannot be
    believed or acted on; nothing is guessed. ArgumentError for `facts` of a model without experts.
    """
    architecture = architecture_of(config)
    if architecture is None or architecture.type not in FAMILIES:
        kind = shown(config.get("model_type") if architecture is None else architecture.type)
        raise ConfigError(MODEL_CONFIG, "model_type", f"a type with a model: {', '.join(FAMILIES)}", kind)
    family = FAMILIES[architecture.type]
    inner = next((key for key, held in config.items() if held is architecture.config), "")
    found = FoundConfig(MODEL_CONFIG, inner, architecture.config)
    said = validate(Said, FoundConfig(MODEL_CONFIG, inner, {**family.defaults, **architecture.config}))
    sizes = Sizes(found, architecture)
    latent = latent_config({**architecture.config, "model_type": architecture.type})
    head, turned, value = sizes.of_heads(latent)
    pairs = family.pairs if latent is None else latent.interleaved
    sparse = sizes.sparse_layers(family)
    if facts is not None and not sparse:
        raise ArgumentError("facts", f"None for a {architecture.type} model without experts", str(facts))
    return TextConfig(
        type=architecture.type,
        architecture=architecture,
        hidden=sizes.needed("hidden"),
        layers=sizes.layers,
        vocab=sizes.needed("vocab"),
        heads=sizes.needed("heads"),
        kv_heads=sizes.kv_heads(),
        head_dim=head,
        v_head_dim=value,
        inner=sizes.inner(f"{family.feed_forward[0]}.gate_proj"),
        expert_inner=sizes.inner(f"{family.feed_forward[0]}.experts.0.gate_proj") if sparse else 0,
        shared_inner=sizes.inner(f"{family.feed_forward[0]}.{family.shared}.gate_proj") if sparse else 0,
        eps=said.rms_norm_eps,
        positions=said.max_position_embeddings,
        activation=_activation(found, said),
        tied=architecture.tied,
        rope=rope_config(found, family, turned, pairs, said.max_position_embeddings),
        biases=sizes.biases(),
        head_norm=family.head_norm if said.use_qk_norm else "none",
        masks=masks_of(found, family, said, sizes.layers),
        sinks=family.sinks,
        temperature=_temperature(family, said),
        routing=routing_of({**architecture.config, "model_type": architecture.type}) if sparse else None,
        facts=facts or (_facts(found, architecture) if sparse else None),
        sparse_layers=sparse,
        latent=latent,
        eos=_eos(said),
        dtype=config_dtype(config),
    )


@dataclass(frozen=True)
class Sizes:
    """The sizes of an architecture that a model cannot do without, or ConfigError."""

    found: FoundConfig
    architecture: Architecture

    def needed(self, name: str) -> int:
        """One size, at least 1."""
        size = self.architecture.sizes[name]
        if size is None or size < 1:
            keys = self.architecture.table.sizes[name].keys
            key = next((key for key in keys if key in self.found.values), keys[0])
            got = shown(self.found.values.get(key)) if key in self.found.values else "nothing"
            raise ConfigError(self.found.file, self.found.key(key), "a size of at least 1", got)
        return size

    @property
    def layers(self) -> int:
        """How many decoder layers."""
        count = self.needed("layers")
        if count > LAYERS:
            key = self.found.key("num_hidden_layers")
            raise ConfigError(self.found.file, key, f"at most {LAYERS}", str(count))
        return count

    def of_heads(self, latent: LatentConfig | None) -> tuple[int, int, int]:
        """Numbers of a head of queries and keys, how many of them are turned, and those of values."""
        if latent is not None:
            return latent.key_size, latent.rope_size, latent.value_size
        self.needed("hidden"), self.needed("heads")  # which sizes of heads follow from
        head = self.needed("head")
        if head > HEAD:
            raise ConfigError(self.found.file, self.found.key("head_dim"), f"at most {HEAD}", str(head))
        return head, head, head

    def kv_heads(self) -> int:
        """Heads of keys and values, each of which serves as many heads of queries."""
        heads = self.needed("heads")
        own = self.needed("kv") if "kv" in self.architecture.sizes else heads
        if heads % own:
            key = self.found.key("num_key_value_heads")
            raise ConfigError(self.found.file, key, f"a divisor of {heads} heads", str(own))
        return own

    def inner(self, name: str) -> int:
        """Outputs of a matrix of a layer; 0 where the architecture has none of this name."""
        expected = self.architecture.expected(f"{FIRST}{name}")
        return expected[0] if expected else 0

    def sparse_layers(self, family: Family) -> frozenset[int]:
        """The layers that have a router; a config that does not tell is refused."""
        router = f"{family.feed_forward[0]}.{family.router}"
        places = [self.architecture.find(f"model.layers.{n}.{router}") for n in range(self.layers)]
        promised = [place is not None and self.architecture.is_promised(place) for place in places]
        if None in promised:
            expected = "numbers that say which layers have experts"
            raise ConfigError(self.found.file, self.found.key("model_type"), expected, self.architecture.type)
        return frozenset(n for n, said in enumerate(promised) if said)

    def biases(self) -> frozenset[str]:
        """The matrices of a layer that the config promises a bias of."""
        lead = "model.layers.{layer}."
        names = [row for row in self.architecture.table.rows if row.name.endswith(".bias")]
        held = {
            row.name.removesuffix(".bias").rpartition(".")[2]
            for row in names
            if row.name.startswith(lead) and not row.optional and self._has(row.name)
        }
        return frozenset(held)

    def _has(self, name: str) -> bool:
        place = self.architecture.find(name.replace("{layer}", "0"))
        return self.architecture.is_promised(place) is True


def _activation(found: FoundConfig, said: Said) -> GatedActivation:
    known = ACTIVATIONS.get(said.hidden_act)
    if known is None:
        expected = f"one of {', '.join(ACTIVATIONS)}"
        raise ConfigError(found.file, found.key("hidden_act"), expected, shown(said.hidden_act))
    return known


def _facts(found: FoundConfig, architecture: Architecture) -> ExpertFacts:
    try:
        return facts_of(architecture)
    except ArgumentError as error:
        key = found.key("swiglu_alpha or swiglu_limit")
        expected = "numbers above 0; or pass facts=ExpertFacts(GatedActivation(...)) to load_model"
        raise ConfigError(found.file, key, expected, error.got) from error


def config_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that config.json names, of the text model or else of the whole; None: none of `DTYPES`."""
    inner = [config[key] for key in INNER if isinstance(config.get(key), dict)]
    names = (part.get(key) for part in (*inner, config) for key in ("dtype", "torch_dtype"))
    return DTYPES.get(str(next(filter(None, names), None)).removeprefix("torch."))


def _temperature(family: Family, said: Said) -> tuple[float, float] | None:
    tuned = family.windows == "chunked" and bool(said.attn_temperature_tuning)
    return (said.floor_scale, said.attn_scale) if tuned else None


def _eos(said: Said) -> tuple[int, ...]:
    ends = said.eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def masks_of(found: FoundConfig, family: Family, said: Said, layers: int) -> tuple[Mask, ...]:
    """What each of `layers` sees; ConfigError for lists that do not say it of each, and for other types."""
    if family.windows == "chunked":
        return _chunked(found, said, layers)
    if family.windows == "none":
        return (Mask(),) * layers
    switched = family.windows in ("every", "alternating") or said.use_sliding_window
    window = said.sliding_window if switched else None
    if family.windows in ("every", "switched"):
        return (Mask(window),) * layers
    types = said.layer_types
    if types is None:
        first, step = (0, 2) if family.windows == "alternating" else (said.max_window_layers, 1)
        slides = range(first, layers, step)
        return tuple(Mask(window if layer in slides else None) for layer in range(layers))
    _check_list(found, "layer_types", types, layers, (FULL, SLIDING))
    if SLIDING in types and window is None:
        raise ConfigError(found.file, found.key("sliding_window"), f"a number, for {SLIDING}", "none")
    return tuple(Mask(window if each == SLIDING else None) for each in types)


def _chunked(found: FoundConfig, said: Said, layers: int) -> tuple[Mask, ...]:
    """Llama 4: rope where `no_rope_layers` has a 1, in spite of its name, and chunks on the same layers."""
    every = said.no_rope_layer_interval
    turned = said.no_rope_layers or [int((n + 1) % every != 0) for n in range(layers)]
    _check_list(found, "no_rope_layers", turned, layers, (0, 1))
    types = said.layer_types or [CHUNKED if each else FULL for each in turned]
    _check_list(found, "layer_types", types, layers, (FULL, CHUNKED))
    chunk = said.attention_chunk_size
    if CHUNKED in types and chunk is None:
        raise ConfigError(found.file, found.key("attention_chunk_size"), f"a number, for {CHUNKED}", "none")
    pairs = zip(types, turned, strict=True)
    return tuple(Mask(None, chunk if kind == CHUNKED else None, bool(rope)) for kind, rope in pairs)


def _check_list(
    found: FoundConfig, key: str, values: list[str] | list[int], layers: int, known: tuple[object, ...]
) -> None:
    if len(values) != layers:
        raise ConfigError(found.file, found.key(key), f"{layers} entries, one a layer", str(len(values)))
    for value in values:
        if value not in known:
            raise ConfigError(found.file, found.key(key), f"{' or '.join(map(str, known))}", shown(value))
