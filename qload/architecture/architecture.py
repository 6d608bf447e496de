"""`Architecture`: names and shapes of the matrices of a model; `Inventory`: the matrices in a checkpoint.

A model's config is hostile input: an implausible value counts as unknown.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

from qload.architecture.drafts import PREDICTING
from qload.architecture.generated_tables import generated_table
from qload.architecture.model_tables import TABLES
from qload.architecture.table import (
    ABSENT,
    DIGITS,
    Flag,
    Lists,
    Row,
    RowMatch,
    Size,
    Table,
    evaluate_predicate,
    evaluate_size,
    find_row,
    read_key,
    read_list,
    row_keys,
    rows_by_key,
    spelled,
    tails,
)
from qload.architecture.table import size_names as named_in
from qload.configs import value_text
from qload.configs.matching import HEAD
from qload.errors import checked
from qload.loader import Heads

SIZE_LIMIT = 1 << 63  # larger sizes are implausible
INNER = ("text_config", "llm_config", "language_config")
TIE = "tie_word_embeddings"
# Last words of transformers' class names.
CLASS_SUFFIXES = ("LM", "Model", "Generation", "Classification", "Answering")
CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def find_table(model_type: str) -> Table | None:
    """Find the table of a type of model."""
    return TABLES.get(model_type) or generated_table(model_type)


def model_of(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Model type with a table, and its config: the whole config, or the section of the text model.

    A generated table counts for its own class only, and after the table of the text model.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in TABLES:
        return model_type, config
    text = next((config[key] for key in INNER if isinstance(config.get(key), dict)), None)
    if text is not None:
        text_type = text.get("model_type")
        if "model_type" not in text and (table := outer_table(config)):
            text_type = table.sections[table.text]
        if isinstance(text_type, str) and text_type in TABLES:
            return text_type, text
    if not isinstance(model_type, str):
        return None
    table = generated_table(model_type)
    return (model_type, config) if table and not table.text and _is_model_of(table, config) else None


def outer_table(config: Mapping[str, Any]) -> Table | None:
    """Find the table of the tensors around a text model that has its own table."""
    model_type = config.get("model_type")
    table = generated_table(model_type) if isinstance(model_type, str) else None
    return table if table is not None and table.text else None


def _is_model_of(table: Table, config: Mapping[str, Any]) -> bool:
    """Return whether the class and the sections of a config are those of a generated table."""
    classes = config.get("architectures")
    if isinstance(classes, list) and classes and not set(table.classes) & {*filter(_is_text, classes)}:
        return False
    sections = {key: kind for key, kind in table.sections.items() if key != table.text}
    return all(read_key(config, f"{key}.model_type") in (ABSENT, kind) for key, kind in sections.items())


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def read_sizes(table: Table, config: Mapping[str, Any]) -> tuple[Mapping[str, int | None], tuple[str, ...]]:
    """Read the sizes of a table, None if unknown, with a note on each value that is not a size."""
    sizes: dict[str, int | None] = {}
    expressions: dict[str, str] = {}
    notes = []
    for name, size in table.sizes.items():
        value = _stated_size(size, config)
        if isinstance(value, str):
            expressions[name] = value
        elif value is None or (type(value) is int and 0 <= value < SIZE_LIMIT):
            sizes[name] = value
        else:
            sizes[name] = None
            key = next(key for key in size.keys if read_key(config, key) is not ABSENT)
            notes.append(
                f"config.json: {key} is {value_text(value)}, not a size: dependent shapes are not checked"
            )
    for name, text in expressions.items():
        sizes[name] = evaluate_size(text, sizes)
    return sizes, tuple(notes)


def read_flag(flag: Flag, config: Mapping[str, Any], sizes: Mapping[str, int | None]) -> bool | None:
    """Read a flag; None if unknown."""
    if flag.size:
        size = sizes[flag.size]
        return None if size is None else size > 0
    value = read_key(config, flag.key) if flag.key else ABSENT
    if value is ABSENT:
        return flag.default
    if flag.given or flag.equals:
        return value is not None if flag.given else value == flag.equals
    return value if isinstance(value, bool) else None


@dataclass(frozen=True)
class Tie:
    """Tie of head and embedding (None: unknown), and its source.

    Attributes
    ----------
    tied
        Whether they are tied.
    key
        Key of config.json; "" for the default of the type `kind`.
    kind
        Model type of the default.
    denied
        A key with the opposite value, read by some programs.
    outer
        True for a default of the model around the text model: transformers uses it, but a program for the
        text model alone does not.
    """

    tied: bool | None
    key: str = ""
    kind: str = ""
    denied: str = ""
    outer: bool = False

    def __str__(self) -> str:
        evaluate_size = str(self.tied).lower()
        if self.key:
            return f"{self.key} is {evaluate_size}" + (f", and {self.denied} is not" if self.denied else "")
        return f"{TIE} is not in config.json, and {evaluate_size} by default for {self.kind}"


def tie_of(config: Mapping[str, Any]) -> Tie:
    """Find the tie in config.json: at the top level, in the text section, or by the type's default."""
    model, outer = model_of(config), config.get("model_type")
    text = (
        model[1] if model else next((config[key] for key in INNER if isinstance(config.get(key), dict)), None)
    )
    sections = {TIE: config}
    if text is not None and text is not config:
        sections[f"{next(key for key in INNER if config.get(key) is text)}.{TIE}"] = text
    keys: dict[bool, str] = {}  # the first key of each value
    for key, section in sections.items():
        if isinstance(section.get(TIE), bool):
            keys.setdefault(section[TIE], key)
    if keys:
        tied = True in keys
        return Tie(tied, keys[tied], denied=keys.get(not tied, ""))
    if model is None:
        return Tie(None)
    table = find_table(model[0])
    around = outer_table(config) if text is not config else None
    if around is not None and around.tied and not (table and table.tied) and isinstance(outer, str):
        return Tie(True, kind=outer, outer=True)
    return Tie(table.tied if table else None, kind=model[0])


def has_head(config: Mapping[str, Any]) -> bool:
    """Return whether the model has a language model head, by `architectures`; True without class names."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes:
        return True
    return any(isinstance(name, str) and name.endswith(CAUSAL) for name in classes)


def is_usual_class(config: Mapping[str, Any]) -> bool:
    """Return whether `architectures` names a usual class of the model type, or no class.

    A draft (`LlamaForCausalLMEagle`, `EagleLlamaForCausalLM`) shares tensors with its target, and lacks them.
    """
    classes, model_type = config.get("architectures"), config.get("model_type")
    if not isinstance(classes, list) or not classes or not isinstance(model_type, str):
        return True
    prefix, table = _letters(model_type.removesuffix("_text")), find_table(model_type)
    named = table.classes if table else ()
    return any(
        isinstance(name, str)
        and (name in named or (name.endswith(CLASS_SUFFIXES) and _letters(name).startswith(prefix)))
        for name in classes
    )


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def _stated_size(size: Size, config: Mapping[str, Any]) -> Any:
    """Size in the config, or the default: a number or an expression.

    A text in the config is wrapped in a list, to tell it from an expression.
    """
    for key in size.keys:
        value = read_key(config, key)
        if value is not ABSENT:
            if value is None:
                return size.null
            return [value] if isinstance(value, str) else value
    return size.default


# Last segments of the names of matrices with a common input, under the same parent.
SAME_INPUT = (
    ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
MAX_CACHED_NAMES = 256
# Vocabularies are padded to a multiple of one of these.
VOCABULARY_MULTIPLES = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Architecture:
    """Names and shapes of a model's tensors, by its config; see `architecture_of`.

    Attributes
    ----------
    type
        The `model_type` of the table.
    table
        Table of the model type.
    config
        Config of the model, possibly a section of the config of an outer model.
    sizes
        Sizes of the table; None for an unknown size.
    tied
        Whether the head is the embedding.
    headed
        Whether the model has a head.
    notes
        Notes on implausible values of the config.
    """

    type: str
    table: Table
    config: Mapping[str, Any] = field(repr=False)
    sizes: Mapping[str, int | None]
    tied: bool
    headed: bool
    notes: tuple[str, ...]

    @property
    def model_config(self) -> Mapping[str, Any]:
        """Config of the text model, with its type."""
        return {**self.config, "model_type": self.type}

    @cached_property
    def flags(self) -> Mapping[str, bool | None]:
        """Flags of the table; None for an unknown flag."""
        return {name: read_flag(flag, self.config, self.sizes) for name, flag in self.table.flags.items()}

    @property
    def layers(self) -> int | None:
        """Number of decoder layers in the config."""
        return self.sizes["layers"]

    @cached_property
    def rows(self) -> Mapping[str, Row]:
        """Rows of the table, by the keys of `find_row`."""
        return rows_by_key(self.table)

    @cached_property
    def stacks(self) -> frozenset[str]:
        """Keys of the rows for one matrix of all experts of a layer."""
        return frozenset(
            key
            for row in self.table.rows
            if "{expert}" in row.name
            for name in row.within
            for key in row_keys(name)
        )

    def find(self, name: str) -> RowMatch | None:
        """Find the row of a `name`: the prefix of a matrix, or the whole name of another tensor."""
        place = self._place(name)
        return None if place is None or self._predicts(place.layer) else place

    def expected(self, prefix: str) -> tuple[int, int] | None:
        """(N, K) of the matrix `prefix`, of a single expert for stacked experts; None if unknown."""
        place = self.find(prefix)
        if place is None or place.row.tensor:
            return None
        N, K = map(self._size, place.row.shape.split())
        return None if N is None or K is None else (N, K)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor other than a matrix, such as a norm's weight, by its whole `name`."""
        place = self.find(name)
        if place is None or not place.row.tensor:
            return None
        sizes = [self._size(text) for text in place.row.shape.split()]
        known = tuple(size for size in sizes if size is not None)
        return known if len(known) == len(sizes) else None

    def paddings(self, prefix: str) -> frozenset[int]:
        """Further possible outputs of the matrix `prefix`: sizes of a padded vocabulary."""
        place, vocabulary = self.find(prefix), self.sizes["vocab"]
        if place is None or vocabulary is None or place.row.shape.split()[:1] != ["vocab"]:
            return frozenset()
        return frozenset(-(-vocabulary // block) * block for block in VOCABULARY_MULTIPLES)

    def said(self, prefix: str) -> str:
        """Shape of the matrix, or the tensor, `prefix` in config keys: "vocab_size, hidden_size"."""
        place = self.find(prefix)
        return "" if place is None else ", ".join(map(self._in_words, place.row.shape.split()))

    def siblings(self, prefix: str) -> tuple[str, ...]:
        """Prefixes of all matrices with the same input as the matrix `prefix`, itself included."""
        place = self.find(prefix)
        parent, dot, last = prefix.rpartition(".")
        group = next((group for group in SAME_INPUT if last in group), None)
        if place is None or place.row.tensor or group is None:
            return ()
        known = [f"{parent}{dot}{name}" for name in group if self.expected(f"{parent}{dot}{name}")]
        return tuple(name for name in known if self.is_promised(self.find(name)) is not False)

    def heads(self, prefix: str) -> Heads | None:
        """Number of heads in the outputs of the matrix `prefix`; None without heads, and if unknown."""
        place = self.find(prefix)
        if place is None or place.row.tensor:
            return None
        needed = named_in(place.row.shape.split()[0], divisors=False)
        counts = {name: self.sizes[name] for name in ("heads", "kv") if name in needed}
        if not counts or not all(counts.values()):
            return None
        return Heads(counts.get("heads"), counts.get("kv"))

    def exempt(self, name: str) -> str | None:
        """Reason why an unread tensor `name` may be stored; None without a reason."""
        if self.predictor(name) is not None:
            count = self.sizes["predict"]
            return f"of one of {count} MTP layers (num_nextn_predict_layers)"
        return next((self.table.exempt[tail] for tail in tails(name) if tail in self.table.exempt), None)

    def predictor(self, name: str) -> int | None:
        """Layer number of a `name` in an MTP layer of the config (num_nextn_predict_layers); else None."""
        number = self.layer(name)
        return number if self._predicts(number) else None

    def layer(self, name: str) -> int | None:
        """Layer number of a `name`, in the table or not; None for a name outside of layers."""
        place = self._place(name)
        if place:
            return place.layer
        for before, part in pairwise(name.split(".")):
            if before in ("layers", "h") and part.isascii() and part.isdecimal() and len(part) <= DIGITS:
                return int(part)
        return None

    def required(self) -> Iterator[str]:
        """Yield the prefixes of all required matrices, and the names of all other required tensors.

        Names are those of transformers; fused and stacked matrices are named in parts. The config is hostile
        and determines their number, so limit the iteration.
        """
        yield from (spelled(row.name) for row in self.table.rows if self.is_needed(row, None))
        layers = [row for row in self.table.rows if "{layer}" in row.name and not row.optional]
        for layer in range(self.layers or 0) if layers else ():
            for row in layers:
                if self.is_needed(row, layer):
                    count = (self.sizes["experts"] or 0) if "{expert}" in row.name else 1
                    yield from (spelled(row.name, layer, expert) for expert in range(count))

    def is_needed(self, row: Row, layer: int | None) -> bool:
        """Return whether a `row` is required, in `layer` for a row of layers."""
        if row.optional or ("{layer}" in row.name) != (layer is not None):
            return False
        if self._is_empty(row.shape):
            return False
        of_head = row.name.removesuffix(".bias") == self.table.head
        if (of_head and not self.headed) or (row.name == self.table.head and self.tied):
            return False
        return self._has_row(row, layer) is True

    def is_promised(self, place: RowMatch | None) -> bool | None:
        """Return whether the model has the row of a `place`, by its config; None if unknown."""
        return None if place is None else self._has_row(place.row, place.layer)

    def _has_row(self, row: Row, layer: int | None) -> bool | None:
        for name in row.when.split():
            flag = self.flags[name.removeprefix("!")]
            if flag is None or flag == name.startswith("!"):
                return None if flag is None else False
        if not row.where or layer is None:
            return True
        predicate = self.table.predicates[row.where.removeprefix("!")]
        value = evaluate_predicate(predicate, self._lists, self.sizes, layer)
        return None if value is None else value is not row.where.startswith("!")

    @cached_property
    def _place(self) -> Callable[[str], RowMatch | None]:
        """`find_row` with a cache, as callers look up the same name repeatedly."""
        return lru_cache(MAX_CACHED_NAMES)(partial(find_row, rows=self.rows, base=self.table.base))

    @cached_property
    def _size(self) -> Callable[[str], int | None]:
        """Cached value of an expression of the table."""
        return cache(partial(evaluate_size, sizes=self.sizes))

    @cached_property
    def _is_empty(self) -> Callable[[str], bool]:
        """Cached: whether the config leaves out tensors of a shape, with a dimension of 0 or null."""
        return cache(lambda shape: any(map(self._is_left_out, shape.split())))

    def _is_left_out(self, dimension: str) -> bool:
        size, sizes = self._size(dimension), self.table.sizes
        if size is not None:
            return size == 0
        return any(
            read_key(self.config, key) is None for name in named_in(dimension) for key in sizes[name].keys
        )

    @cached_property
    def _lists(self) -> Lists:
        kinds = self.table.kinds
        return cache(lambda key: read_list(self.config, key, kinds.get(key, frozenset())))

    def _predicts(self, layer: int | None) -> bool:
        """Return whether a layer is an MTP layer, after the decoder layers."""
        extra, layers = self.sizes.get("predict"), self.layers
        return None not in (layer, extra, layers) and layers <= layer < layers + extra  # type: ignore[operator]

    def _in_words(self, text: str) -> str:
        for name in sorted(named_in(text), key=len, reverse=True):
            keys = self.table.sizes[name].keys
            key = next((key for key in keys if read_key(self.config, key) is not ABSENT), keys[0])
            text = "".join(key if part == name else part for part in re.split(r"([+*/])", text))
        return text.replace("*", " * ").replace("+", " + ").replace("/", " / ")


@checked
def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """Architecture by a model's `config.json`; None for a `model_type` without a table.

    `config`: the whole file. A multimodal model counts as its text model. The config is hostile: an
    implausible size is unknown, and no enumeration follows a claimed count.

    Examples
    --------
    >>> from qload import architecture_of
    >>> sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> model = architecture_of({"model_type": "llama", **sizes})
    >>> model.expected("model.layers.0.self_attn.k_proj"), model.tied
    ((32, 64), False)
    >>> model.siblings("model.layers.0.mlp.up_proj")
    ('model.layers.0.mlp.gate_proj', 'model.layers.0.mlp.up_proj')
    """
    return read_architecture(config)


def read_architecture(config: Mapping[str, Any]) -> Architecture | None:
    """Architecture by a `config.json` that is an object; see `architecture_of`."""
    architecture = read_text_architecture(config)
    if architecture is None or architecture.config is config:
        return architecture
    table = outer_table(config)
    if table is None or config.get(table.text) is not architecture.config or not _is_model_of(table, config):
        return architecture
    return join_towers(architecture, table, config)


def join_towers(architecture: Architecture, table: Table, config: Mapping[str, Any]) -> Architecture:
    """Add the tensors around a text model, by the table and the config of the outer model."""
    sizes, notes = read_sizes(table, config)
    flags = {name: Flag(default=read_flag(flag, config, sizes)) for name, flag in table.flags.items()}
    joined = replace(
        architecture.table,
        sizes={**table.sizes, **architecture.table.sizes},
        flags={**flags, **architecture.table.flags},
        rows=(*architecture.table.rows, *table.rows),
    )
    return replace(
        architecture,
        table=joined,
        sizes={**sizes, **architecture.sizes},
        notes=(*architecture.notes, *notes),
    )


def read_text_architecture(config: Mapping[str, Any]) -> Architecture | None:
    """Architecture of the text model alone; see `read_architecture`."""
    model = model_of(config)
    if model is None:
        return None
    model_type, own_config = model
    table = find_table(model_type)
    assert table is not None
    sizes, notes = read_sizes(table, own_config)
    tied = bool(tie_of(config).tied) and table.ties
    headed = has_head(config) or (bool(table.classes) and is_usual_class(config))
    return Architecture(model_type, table, own_config, sizes, tied, headed, notes)


SHOWN = 8  # layer or expert numbers in a list


@dataclass(frozen=True)
class Missing:
    """Missing tensors: name of the first, kind of their owner, and numbers of layers or experts."""

    name: str
    what: str
    numbers: tuple[int, ...] = ()
    count: int = 1
    total: int = 1


class Inventory:
    """Inventory of a checkpoint's tensors by the rows of its architecture.

    `names`: prefixes of layers with a weight, and names of other tensors. Work and memory are proportional to
    them and to the table, for any numbers in the config.
    """

    def __init__(self, architecture: Architecture, names: Iterable[str]) -> None:
        self.architecture = architecture
        self._model: dict[str, str] = {}
        self._layers: dict[int, set[str]] = defaultdict(set)
        self._experts: dict[tuple[int, str], set[int]] = defaultdict(set)
        self._first: RowMatch | None = None
        self._predictors: dict[int, bool] = {}
        self._predicting: set[int] = set()
        for name in names:
            place = architecture.find(name)
            if place is None:
                if name == HEAD:  # of the whole model, where the text model has a head of another name
                    self._model[HEAD] = name
                self._add_predictor(name)
                continue
            self._first = self._first or place
            if place.layer is None:
                self._model.setdefault(place.key, name)
            elif place.expert is None:
                self._layers[place.layer].add(place.key)
            else:
                self._layers.setdefault(place.layer, set())
                self._experts[place.layer, place.key].add(place.expert)

    @property
    def layers(self) -> frozenset[int]:
        """Numbers of the stored layers."""
        return frozenset(self._layers)

    @property
    def plain_predictors(self) -> frozenset[int]:
        """MTP layers of the config without the tensors of MTP layers."""
        return frozenset(number for number, predicts in self._predictors.items() if not predicts)

    @property
    def undeclared_predictors(self) -> frozenset[int]:
        """Layers above the layer count with the tensors of MTP layers, unknown to the config."""
        return frozenset(self._predicting - self._predictors.keys())

    def spell(self, *names: str) -> tuple[str, ...]:
        """Names of single matrices in the spelling of this checkpoint."""
        rows = [row for row in self.architecture.table.rows if row.name in names]
        return tuple(self._spell(next(row for row in rows if row.name == name)) for name in names)

    def name_of_layer(self, layer: int) -> str:
        """Name of a layer in the spelling of this checkpoint, such as `model.layers.3`."""
        row = next(row for row in self.architecture.table.rows if "{layer}" in row.name)
        return self._spell(row, layer).partition(f".{layer}.")[0] + f".{layer}"

    def lost_layers(self) -> tuple[tuple[int, ...], int]:
        """First missing layer numbers below the layer count, and the number of missing layers."""
        return absent(self.architecture.layers or 0, self.layers)

    def missing(self) -> Iterator[Missing]:
        """Yield missing tensors of the model, of stored layers, and of experts."""
        for row in self.architecture.table.rows:
            if self.architecture.is_needed(row, None) and not self._has_model(row):
                yield Missing(self._spell(row), "the model")
        yield from self._lost_experts()
        for row in self.architecture.table.rows:
            if "{layer}" in row.name:
                yield from (self._of_experts if "{expert}" in row.name else self._of_layers)(row)

    @cached_property
    def _counted(self) -> list[int]:
        """Stored layers below the layer count, sorted."""
        count = self.architecture.layers
        return [] if count is None else sorted(layer for layer in self._layers if layer < count)

    def _add_predictor(self, name: str) -> None:
        predicts = not PREDICTING.isdisjoint(name.split("."))
        if not predicts and not self.architecture.sizes.get("predict"):
            return
        number = self.architecture.predictor(name)
        if number is not None:
            self._predictors[number] = self._predictors.get(number, False) or predicts
        elif predicts:
            layer, count = self.architecture.layer(name), self.architecture.layers
            if layer is not None and count is not None and layer >= count:
                self._predicting.add(layer)

    def _has_model(self, row: Row) -> bool:
        names, table = {row.name}, self.architecture.table
        if row.name == table.head:
            names.add(HEAD)
        if self.architecture.tied and row.name == table.embedding:
            names.add(table.head)  # either tensor suffices
        return any(key in self._model for name in names for key in row_keys(name))

    def _of_layers(self, row: Row) -> Iterator[Missing]:
        needed = [layer for layer in self._counted if self.architecture.is_needed(row, layer)]
        accepted = {key for name in (row.name, *row.within) for key in row_keys(name)}
        lost = [layer for layer in needed if accepted.isdisjoint(self._layers[layer])]
        if lost:
            yield Missing(self._spell(row, lost[0]), "layers", tuple(lost[:SHOWN]), len(lost), len(needed))

    def _of_experts(self, row: Row) -> Iterator[Missing]:
        """Yield the experts without this matrix, with other matrices stored."""
        lost = []
        for layer in self._counted:
            if self.architecture.is_needed(row, layer) and not self._is_stacked(row, layer):
                known = {
                    expert for key in row_keys(row.name) for expert in self._experts.get((layer, key), ())
                }
                lost += [(layer, expert) for expert in sorted(self._stored_experts[layer] - known)]
        if lost:
            name = self._spell(row, *lost[0])
            yield Missing(name, "experts", tuple(expert for _, expert in lost[:SHOWN]), len(lost), len(lost))

    def _lost_experts(self) -> Iterator[Missing]:
        """Yield the experts without any matrix, layer by layer."""
        rows = [row for row in self.architecture.table.rows if "{expert}" in row.name]
        count = self.architecture.sizes.get("experts") or 0
        for layer in self._counted if rows else ():
            stored = bool(self._stored_experts[layer])
            needed = [
                row for row in rows if self.architecture.is_needed(row, layer) or (stored and row.optional)
            ]
            if not needed or all(self._is_stacked(row, layer) for row in needed):
                continue
            first, lost = absent(count, self._stored_experts[layer])
            if lost:
                name = self._spell(needed[0], layer, first[0]).rpartition(".")[0]
                yield Missing(name, "experts", first, lost, count)

    @cached_property
    def _stored_experts(self) -> dict[int, set[int]]:
        """Layer -> its experts with any tensor."""
        stored: dict[int, set[int]] = defaultdict(set)
        for (layer, _), experts in self._experts.items():
            stored[layer] |= experts
        return stored

    def _is_stacked(self, row: Row, layer: int) -> bool:
        return any(key in self._layers[layer] for name in row.within for key in row_keys(name))

    def _spell(self, row: Row, layer: int | None = None, expert: int | None = None) -> str:
        """Name of a row in the spelling of this checkpoint, as far as known."""
        if layer is None and row_keys(row.name)[0] in self._model:
            return self._model[row_keys(row.name)[0]]
        name, first = spelled(row.name, layer, expert), self._first
        if first is None:
            return name
        return first.lead + (name.removeprefix(f"{self.architecture.table.base}.") if first.bare else name)


def absent(count: int, stored: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """First missing numbers below a count, and how many are missing, without enumerating the count."""
    present = {number for number in stored if number < count}
    first: list[int] = []
    number = 0
    while number < count and len(first) < SHOWN:
        if number not in present:
            first.append(number)
        number += 1
    return tuple(first), count - len(present)
