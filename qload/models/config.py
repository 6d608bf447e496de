"""Configs of text models, validated from `config.json`: sizes, attention masks, latent attention.

Keys and defaults are those of transformers 5.23.0, in the hub's spelling as well. Keys that transformers' own
code for a model type does not read are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import torch
from pydantic import Field

from qload.architecture import Architecture, architecture_of
from qload.architecture.architecture import INNER
from qload.architecture.table import size_names
from qload.configs import Excerpt, FoundConfig, validate, value_text
from qload.detect.config_reader import MODEL_CONFIG
from qload.errors import ArgumentError, ConfigError, check_fields, checked
from qload.experts import ExpertFacts, GatedActivation, Routing, routing_of
from qload.experts.activation import ACTIVATIONS, facts_of
from qload.models.families import FAMILIES, Family
from qload.models.rope import RopeConfig, rope_config

MAX_LAYERS = 4096  # the mask of each layer is kept in memory
MAX_HEAD_SIZE = 1 << 16  # the rotary frequencies are computed before any weight is read
MAX_LATENT_SIZE = 1 << 20

Positions = Annotated[int, Field(ge=1, le=1 << 31)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LatentSize = Annotated[int, Field(ge=1, le=MAX_LATENT_SIZE)]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite")
INTERLEAVED_TYPES = ("deepseek_v2", "deepseek_v32")  # types that do not read `rope_interleave`
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention, which expands keys and values from one vector per token.

    ArgumentError for a size below 1, and for an odd number of rotated elements.

    Attributes
    ----------
    q_rank, kv_rank
        Length of the compressed vector of queries, `q_lora_rank`, and of keys and values, `kv_lora_rank`.
        `q_rank` None: queries are projected from the hidden state.
    nope_size, rope_size, value_size
        Elements of a head: of queries and keys without and with rotary embedding, and of values. All heads
        share the rotated elements of the key.
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
        """Elements of a head of queries or keys, both parts, as the cache of keys stores them."""
        return self.nope_size + self.rope_size


class _LatentFields(Excerpt):
    """Fields of latent attention. `head_dim`, which repeats the size of the rotated part, is not read."""

    q_lora_rank: LatentSize | None = 1536
    kv_lora_rank: LatentSize = 512
    qk_nope_head_dim: LatentSize = 128
    qk_rope_head_dim: Annotated[LatentSize, Field(multiple_of=2)] = 64
    v_head_dim: LatentSize = 128
    rope_interleave: bool | None = True


@checked
def latent_config(config: Mapping[str, Any]) -> LatentConfig | None:
    """Read the sizes of latent attention from a model's `config`; None for a model without it.

    `config`: the whole `config.json`; of a multimodal model the text model's section is read. ConfigError
    names the key of an invalid size.
    """
    model = architecture_of(config)
    if model is None or model.type not in LATENT_TYPES:
        return None
    section = _text_section(config, model)
    values = {**FAMILIES[model.type].defaults, **section.values}
    fields = validate(_LatentFields, FoundConfig(section.file, section.section, values))
    return LatentConfig(
        fields.q_lora_rank,
        fields.kv_lora_rank,
        fields.qk_nope_head_dim,
        fields.qk_rope_head_dim,
        fields.v_head_dim,
        model.type in INTERLEAVED_TYPES or bool(fields.rope_interleave),
    )


@dataclass(frozen=True)
class IndexerConfig:
    """Sizes of DeepSeek V3.2's indexer; see `qload.models.indexer`.

    Attributes
    ----------
    heads, head_size
        `index_n_heads` and `index_head_dim`.
    top_k
        Number of keys that a token attends to, `index_topk`.
    """

    heads: int
    head_size: int
    top_k: int


class _IndexerFields(Excerpt):
    index_n_heads: LatentSize = 64
    index_head_dim: LatentSize = 128
    index_topk: Positions = 2048


def _indexer_config(section: FoundConfig, latent: LatentConfig) -> IndexerConfig:
    """Read the sizes of the indexer, which chooses keys by the compressed queries."""
    if latent.q_rank is None:
        raise section.error("q_lora_rank", "a number, for the indexer", "nothing")
    fields = validate(_IndexerFields, section)
    if fields.index_head_dim < latent.rope_size:
        expected = f"at least {latent.rope_size}, the rotated elements"
        raise section.error("index_head_dim", expected, str(fields.index_head_dim))
    return IndexerConfig(fields.index_n_heads, fields.index_head_dim, fields.index_topk)


@dataclass(frozen=True)
class Mask:
    """Causal attention mask of a layer, and its use of rotary embedding.

    Attributes
    ----------
    window
        Size of a sliding window: a token at i attends to j where i - window < j <= i; None: no window.
    chunk
        Size of a chunk: a token at i attends to j <= i where i // chunk == j // chunk; None: no chunks.
    rotary
        Whether queries and keys get rotary embedding.
    """

    window: int | None = None
    chunk: int | None = None
    rotary: bool = True


CAUSAL = Mask()


class TextConfigFields(Excerpt):
    """Fields of a text model's config other than the sizes of `qload.architecture`."""

    rms_norm_eps: Fraction
    max_position_embeddings: Positions
    eos_token_id: int | list[int] | None
    hidden_act: str = "silu"
    dtype: str | None = None
    torch_dtype: str | None = None
    sliding_window: Positions | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    attention_chunk_size: Positions | None = 8192
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Positions = 4
    use_qk_norm: bool = True
    attn_temperature_tuning: bool | int = True  # published files have 4, which means true
    floor_scale: PositiveFloat = 8192.0
    attn_scale: PositiveFloat = 0.1


@dataclass(frozen=True)
class TextConfig:
    """Config of a text model; see `text_config`.

    Attributes
    ----------
    type
        The `model_type`, a key of `qload.models.families`.
    architecture
        Names and sizes of the model's tensors.
    hidden, layers, vocab
        Hidden size H, number of decoder layers, and vocabulary size.
    heads, kv_heads, head_dim, v_head_dim
        Heads of queries, and of keys and values; elements of a head of queries and keys, and of values.
    inner, expert_inner, shared_inner
        Intermediate size of a dense layer, of an expert, and of the shared expert; 0 where there is none.
    eps, positions
        Epsilon of norms; number of trained positions.
    activation
        Gated activation of a dense layer.
    tied
        Whether the head shares the embedding's weight.
    rope
        Rotary embedding.
    biases
        Last name parts of the matrices with a bias.
    head_norm
        Norm of each head of queries and keys: "none"; "before rope", with a weight; "after rope", without.
    masks
        Attention mask of each layer.
    sinks
        Whether each head has an attention sink.
    temperature
        Floor and scale of Llama 4's attention temperature, for layers without rope; None: no temperature.
    routing, facts
        Routing of tokens to experts, and the computation inside an expert; None for a model without experts.
    sparse_layers
        Numbers of the layers with experts.
    latent
        Sizes of latent attention; None: plain attention.
    indexer
        Sizes of DeepSeek V3.2's indexer; None: tokens attend to all visible keys.
    eos
        Ids of the end-of-text tokens.
    dtype
        The dtype of floats that the config names; None for no or an unknown one.
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
    indexer: IndexerConfig | None
    eos: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def family(self) -> Family:
        """Properties of this model type, beyond names and sizes of tensors."""
        return FAMILIES[self.type]

    def sparse(self, layer: int) -> bool:
        """Return whether the decoder layer `layer` has experts."""
        return layer in self.sparse_layers


@checked
def text_config(config: Mapping[str, Any], facts: ExpertFacts | None = None) -> TextConfig:
    """Read the config of a model's text model from its `config.json`, by `model_type`.

    `config`: the whole file, which is not changed. `facts`: the computation inside an expert; None: as the
    file says. ConfigError names the key of an unsupported model type, and of an invalid or unsupported value.
    ArgumentError for `facts` of a model without experts.
    """
    architecture = architecture_of(config)
    if architecture is None or architecture.type not in FAMILIES:
        kind = value_text(config.get("model_type") if architecture is None else architecture.type)
        raise ConfigError(MODEL_CONFIG, "model_type", f"a supported type: {', '.join(FAMILIES)}", kind)
    family, feed_forward = FAMILIES[architecture.type], FAMILIES[architecture.type].feed_forward[0]
    section = _text_section(config, architecture)
    values = {**architecture.config, "model_type": architecture.type}
    fields = validate(
        TextConfigFields, FoundConfig(section.file, section.section, {**family.defaults, **section.values})
    )
    sizes = _Sizes(section, architecture)
    latent = latent_config(values)
    head_size, rope_size, value_size = sizes.head_sizes(latent)
    pairs = family.pairs if latent is None else latent.interleaved
    sparse_layers = sizes.sparse_layers(family)
    if facts is not None and not sparse_layers:
        raise ArgumentError("facts", f"None for a {architecture.type} model without experts", str(facts))
    tuned = family.windows == "chunked" and bool(fields.attn_temperature_tuning)
    eos = fields.eos_token_id
    return TextConfig(
        type=architecture.type,
        architecture=architecture,
        hidden=sizes.require("hidden"),
        layers=sizes.layers,
        vocab=sizes.require("vocab"),
        heads=sizes.require("heads"),
        kv_heads=sizes.kv_heads(),
        head_dim=head_size,
        v_head_dim=value_size,
        inner=sizes.outputs(f"{feed_forward}.gate_proj"),
        expert_inner=sizes.outputs(f"{feed_forward}.experts.0.gate_proj") if sparse_layers else 0,
        shared_inner=sizes.outputs(f"{feed_forward}.{family.shared}.gate_proj") if sparse_layers else 0,
        eps=fields.rms_norm_eps,
        positions=fields.max_position_embeddings,
        activation=read_activation(section, fields.hidden_act),
        tied=architecture.tied,
        rope=rope_config(section, family, rope_size, pairs, fields.max_position_embeddings),
        biases=sizes.biases(),
        head_norm=family.head_norm if fields.use_qk_norm else "none",
        masks=_layer_masks(section, family, fields, sizes.layers),
        sinks=family.sinks,
        temperature=(fields.floor_scale, fields.attn_scale) if tuned else None,
        routing=routing_of(values) if sparse_layers else None,
        facts=facts or (_expert_facts(section, architecture) if sparse_layers else None),
        sparse_layers=sparse_layers,
        latent=latent,
        indexer=_indexer_config(section, latent) if latent and family.indexed else None,
        eos=(eos,) if isinstance(eos, int) else tuple(eos or ()),
        dtype=config_dtype(config),
    )


def _text_section(config: Mapping[str, Any], architecture: Architecture) -> FoundConfig:
    """Return the section of `config.json` with the text model's config, by its key; "" for the whole file."""
    key = next((key for key, section in config.items() if section is architecture.config), "")
    return FoundConfig(MODEL_CONFIG, key, architecture.config)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of an architecture that a model requires; ConfigError for a missing or invalid one."""

    section: FoundConfig
    architecture: Architecture

    def require(self, name: str) -> int:
        """Return a size of at least 1."""
        size = self.architecture.sizes[name]
        if size is None or size < 1:
            keys, values = self.architecture.table.sizes[name].keys, self.section.values
            key = next((key for key in keys if key in values), keys[0])
            raise self.section.error(
                key, "a size of at least 1", value_text(values[key]) if key in values else "nothing"
            )
        return size

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        count = self.require("layers")
        if count > MAX_LAYERS:
            raise self.section.error("num_hidden_layers", f"at most {MAX_LAYERS}", str(count))
        return count

    def head_sizes(self, latent: LatentConfig | None) -> tuple[int, int, int]:
        """Return the elements of a head of queries and keys, its rotated elements, and those of values."""
        if latent is not None:
            return latent.key_size, latent.rope_size, latent.value_size
        self.require("hidden"), self.require("heads")  # the default size of a head is their quotient
        size = self.require("head")
        if size > MAX_HEAD_SIZE:
            raise self.section.error("head_dim", f"at most {MAX_HEAD_SIZE}", str(size))
        return size, size, size

    def kv_heads(self) -> int:
        """Return the number of key and value heads, each shared by an equal number of query heads."""
        heads = self.require("heads")
        kv_heads = self.require("kv") if "kv" in self.architecture.sizes else heads
        if heads % kv_heads:
            raise self.section.error("num_key_value_heads", f"a divisor of {heads} heads", str(kv_heads))
        return kv_heads

    def outputs(self, name: str) -> int:
        """Return the outputs N of a matrix of the first layer; 0 for a matrix outside the architecture.

        ConfigError for a matrix of unknown size: without it a layer would lack a part.
        """
        prefix = f"model.layers.0.{name}"
        place, shape = self.architecture.find(prefix), self.architecture.expected(prefix)
        if place is not None and shape is None:
            for size in sorted({*chain.from_iterable(map(size_names, place.row.shape.split()))}):
                self.require(size)
        return shape[0] if shape else 0

    def sparse_layers(self, family: Family) -> frozenset[int]:
        """Return the numbers of the layers with a router; ConfigError where the config leaves it open."""
        router = f"{family.feed_forward[0]}.{family.router}"
        rows = [self.architecture.find(f"model.layers.{n}.{router}") for n in range(self.layers)]
        has_router = [row is not None and self.architecture.is_promised(row) for row in rows]
        if None in has_router:
            raise self.section.error(
                "model_type", "numbers of the layers with experts", self.architecture.type
            )
        return frozenset(n for n, sparse in enumerate(has_router) if sparse)

    def biases(self) -> frozenset[str]:
        """Return the last name parts of a layer's matrices with a bias, by the config."""
        names = [
            row.name
            for row in self.architecture.table.rows
            if row.name.startswith("model.layers.{layer}.")
            and row.name.endswith(".bias")
            and not row.optional
        ]
        find, is_promised = self.architecture.find, self.architecture.is_promised
        promised = [name for name in names if is_promised(find(name.replace("{layer}", "0"))) is True]
        return frozenset(name.removesuffix(".bias").rpartition(".")[2] for name in promised)


def read_activation(section: FoundConfig, name: str) -> GatedActivation:
    """Return the activation `name`, the `hidden_act` of a config's `section`; ConfigError if unknown."""
    if name not in ACTIVATIONS:
        expected = f"one of {', '.join(ACTIVATIONS)}"
        raise section.error("hidden_act", expected, value_text(name))
    return ACTIVATIONS[name]


def _expert_facts(section: FoundConfig, architecture: Architecture) -> ExpertFacts:
    try:
        return facts_of(architecture)
    except ArgumentError as error:
        expected = "numbers above 0; or pass facts=ExpertFacts(GatedActivation(...)) to load_model"
        raise section.error("swiglu_alpha or swiglu_limit", expected, error.got) from error


def config_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype in config.json, of the text model's section first; None if it is not in `DTYPES`."""
    sections = [config[key] for key in INNER if isinstance(config.get(key), dict)]
    names = (section.get(key) for section in (*sections, config) for key in ("dtype", "torch_dtype"))
    return DTYPES.get(str(next(filter(None, names), None)).removeprefix("torch."))


def _layer_masks(
    section: FoundConfig, family: Family, fields: TextConfigFields, layers: int
) -> tuple[Mask, ...]:
    """Return the mask of each layer; ConfigError for lists of another length, and for unknown entries."""
    if family.windows == "chunked":
        return _chunked_masks(section, fields, layers)
    if family.windows == "none":
        return (CAUSAL,) * layers
    enabled = family.windows in ("every", "alternating") or fields.use_sliding_window
    window = fields.sliding_window if enabled else None
    if family.windows in ("every", "switched"):
        return (Mask(window),) * layers
    types = fields.layer_types
    if types is None:
        first, step = (0, 2) if family.windows == "alternating" else (fields.max_window_layers, 1)
        sliding = range(first, layers, step)
        return tuple(Mask(window if layer in sliding else None) for layer in range(layers))
    _check_entries(section, "layer_types", types, layers, (FULL, SLIDING))
    if SLIDING in types and window is None:
        raise section.error("sliding_window", f"a number, for {SLIDING}", "none")
    return tuple(Mask(window if entry == SLIDING else None) for entry in types)


def _chunked_masks(section: FoundConfig, fields: TextConfigFields, layers: int) -> tuple[Mask, ...]:
    """Llama 4: rope where `no_rope_layers` has a 1, in spite of its name, and chunks on the same layers."""
    interval = fields.no_rope_layer_interval
    rotary = fields.no_rope_layers or [int((n + 1) % interval != 0) for n in range(layers)]
    _check_entries(section, "no_rope_layers", rotary, layers, (0, 1))
    types = fields.layer_types or [CHUNKED if entry else FULL for entry in rotary]
    _check_entries(section, "layer_types", types, layers, (FULL, CHUNKED))
    chunk = fields.attention_chunk_size
    if CHUNKED in types and chunk is None:
        raise section.error("attention_chunk_size", f"a number, for {CHUNKED}", "none")
    pairs = zip(types, rotary, strict=True)
    return tuple(Mask(None, chunk if entry == CHUNKED else None, bool(rope)) for entry, rope in pairs)


def _check_entries(
    section: FoundConfig, key: str, entries: list[str] | list[int], layers: int, known: tuple[object, ...]
) -> None:
    if len(entries) != layers:
        raise section.error(key, f"{layers} entries, one per layer", str(len(entries)))
    for entry in entries:
        if entry not in known:
            raise section.error(key, " or ".join(map(str, known)), value_text(entry))
