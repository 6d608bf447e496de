"""`Architecture`: names and shapes of the matrices of a model; `Inventory`: the matrices in a checkpoint."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

from qload.architecture.config import PREDICTING, has_head, model_of, read_flag, read_list, read_sizes, tie_of
from qload.architecture.model_tables import TABLES
from qload.architecture.table import (
    LISTS,
    Lists,
    Place,
    Row,
    Table,
    evaluate_size,
    find_row,
    row_keys,
    rows_by_key,
    spelled,
    tails,
)
from qload.architecture.table import size_names as named_in
from qload.errors import checked
from qload.loader import Heads

# The last parts of the names of matrices that multiply the same input, of one parent each.
SAME_INPUT = (
    ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
MAX_CACHED_NAMES = 256  # names
VOCABULARY_MULTIPLES = (
    8,
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
)  # programs pad vocabularies to a multiple of one of these


@dataclass(frozen=True)
class Architecture:
    """What a config tells of a model's tensors; see `architecture_of`.

    Attributes
    ----------
    type
        The `model_type` whose table this is.
    table
        The table.
    config
        The config of this very model, which may stand inside of another.
    sizes
        Each size of the table; None: not known.
    tied
        Whether the head is the embedding.
    headed
        Whether the model has a head at all.
    notes
        What in the config cannot be believed.
    """

    type: str
    table: Table
    config: Mapping[str, Any] = field(repr=False)
    sizes: Mapping[str, int | None]
    tied: bool
    headed: bool
    notes: tuple[str, ...] = ()

    @cached_property
    def flags(self) -> Mapping[str, bool | None]:
        """Each flag of the table; None: not known."""
        return {name: read_flag(flag, self.config, self.sizes) for name, flag in self.table.flags.items()}

    @property
    def layers(self) -> int | None:
        """How many decoder layers the config counts."""
        return self.sizes["layers"]

    @cached_property
    def rows(self) -> Mapping[str, Row]:
        """The rows of the table, by the keys of `find`."""
        return rows_by_key(self.table)

    def find(self, name: str) -> Place | None:
        """The row that a `name`, the prefix of a matrix or the whole name of a tensor, belongs to."""
        place = self._place(name)
        return None if place is None or self._predicts(place.layer) else place

    def expected(self, prefix: str) -> tuple[int, int] | None:
        """(N, K) of the matrix under `prefix`, of one expert where experts are stacked; None: not known."""
        place = self.find(prefix)
        if place is None or place.row.tensor:
            return None
        N, K = map(self._size, place.row.shape.split())
        return None if N is None or K is None else (N, K)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor that is no matrix, such as a norm's weight, by its whole `name`."""
        place = self.find(name)
        if place is None or not place.row.tensor:
            return None
        sizes = [self._size(text) for text in place.row.shape.split()]
        known = tuple(size for size in sizes if size is not None)
        return known if len(known) == len(sizes) else None

    def paddings(self, prefix: str) -> frozenset[int]:
        """How many outputs the matrix under `prefix` may have too: those of a padded vocabulary."""
        place, vocabulary = self.find(prefix), self.sizes["vocab"]
        if place is None or vocabulary is None or place.row.shape.split()[0] != "vocab":
            return frozenset()
        return frozenset(-(-vocabulary // block) * block for block in VOCABULARY_MULTIPLES)

    def said(self, prefix: str) -> str:
        """(N, K) of a matrix, or the shape of a tensor, in the words of the config, by `prefix` or name."""
        place = self.find(prefix)
        return "" if place is None else ", ".join(map(self._in_words, place.row.shape.split()))

    def siblings(self, prefix: str) -> tuple[str, ...]:
        """The prefixes of all matrices that multiply the input of that under `prefix`, itself among them."""
        place = self.find(prefix)
        parent, dot, last = prefix.rpartition(".")
        group = next((group for group in SAME_INPUT if last in group), None)
        if place is None or place.row.tensor or group is None:
            return ()
        known = [f"{parent}{dot}{name}" for name in group if self.expected(f"{parent}{dot}{name}")]
        return tuple(name for name in known if self.is_promised(self.find(name)) is not False)

    def heads(self, prefix: str) -> Heads | None:
        """How many heads the outputs of the matrix under `prefix` are; None: they are none, or not known."""
        place = self.find(prefix)
        if place is None or place.row.tensor:
            return None
        needed = named_in(place.row.shape.split()[0])
        counts = {name: self.sizes[name] for name in ("heads", "kv") if name in needed}
        if not counts or not all(counts.values()):
            return None
        return Heads(counts.get("heads"), counts.get("kv"))

    def exempt(self, name: str) -> str | None:
        """Why a tensor `name` may be stored that nothing reads; None where there is no such reason."""
        if self.predictor(name) is not None:
            count = self.sizes["predict"]
            return f"of one of {count} layers that predict further words (num_nextn_predict_layers)"
        return next((self.table.exempt[tail] for tail in tails(name) if tail in self.table.exempt), None)

    def predictor(self, name: str) -> int | None:
        """The number of the layer that a `name` is of, if the config has it predict further words."""
        number = self.layer(name)
        return number if self._predicts(number) else None

    def layer(self, name: str) -> int | None:
        """The number of the layer that a `name` is of, known to the table or not; None: it is of none."""
        place = self._place(name)
        return place.layer if place else next(self._layers_in(name), None)

    def required(self) -> Iterator[str]:
        """The prefix of each matrix, and the name of each other tensor, that has to be stored.

        In the names of transformers, one after another, as many as the config says: it is hostile, so take
        no more of them than you can hold. What is stored fused or stacked is named in parts.
        """
        yield from (spelled(row.name) for row in self.table.rows if self.is_needed(row, None))
        layers = [row for row in self.table.rows if "{layer}" in row.name]
        for layer in range(self.layers or 0):
            for row in layers:
                if self.is_needed(row, layer):
                    count = (self.sizes["experts"] or 0) if "{expert}" in row.name else 1
                    yield from (spelled(row.name, layer, expert) for expert in range(count))

    def is_needed(self, row: Row, layer: int | None) -> bool:
        """Whether a `row` has to be stored, of a `layer` where it is of one."""
        if row.optional or ("{layer}" in row.name) != (layer is not None):
            return False
        of_head = row.name.removesuffix(".bias") == self.table.head
        if (of_head and not self.headed) or (row.name == self.table.head and self.tied):
            return False
        return self._holds(row, layer) is True

    def is_promised(self, place: Place | None) -> bool | None:
        """Whether the config says that there is what stands at a `place`; None: not known."""
        return None if place is None else self._holds(place.row, place.layer)

    def _holds(self, row: Row, layer: int | None) -> bool | None:
        for name in row.when.split():
            flag = self.flags[name.removeprefix("!")]
            if flag is None or flag == name.startswith("!"):
                return None if flag is None else False
        if not row.where or layer is None:
            return True
        sparse = self.table.sparse and self.table.sparse(self._lists, self.sizes, layer)
        return None if sparse is None else sparse == (row.where == "sparse")

    @cached_property
    def _place(self) -> Callable[[str], Place | None]:
        """`find` of the names that were looked up last, as rules ask several things of one name."""
        return lru_cache(MAX_CACHED_NAMES)(partial(find_row, rows=self.rows, base=self.table.base))

    @cached_property
    def _size(self) -> Callable[[str], int | None]:
        """The value of each expression of the table, which are few."""
        return cache(partial(evaluate_size, sizes=self.sizes))

    @cached_property
    def _lists(self) -> Lists:
        return {key: read_list(self.config, key) for key in LISTS}

    def _predicts(self, layer: int | None) -> bool:
        """Whether a layer is one of those after the last that predict further words."""
        extra, layers = self.sizes.get("predict"), self.layers
        return None not in (layer, extra, layers) and layers <= layer < layers + extra  # type: ignore[operator]

    def _layers_in(self, name: str) -> Iterator[int]:
        """The number after the name of the list of layers, where there is one."""
        parts = name.split(".")
        for before, part in pairwise(parts):
            if before in ("layers", "h") and part.isascii() and part.isdecimal() and len(part) < 19:
                yield int(part)

    def _in_words(self, text: str) -> str:
        for name in sorted(named_in(text), key=len, reverse=True):
            keys = self.table.sizes[name].keys
            key = next((key for key in keys if key in self.config), keys[0])
            text = "".join(key if part == name else part for part in re.split(r"([+*/])", text))
        return text.replace("*", " * ").replace("+", " + ").replace("/", " / ")


@checked
def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """What a model's `config.json` tells of its tensors, by `model_type`; None for a type of no table.

    `config`: the whole file. Of a model that sees or hears too, its text model is meant. Values are not
    believed: a size that is none is not known, and nothing is counted out that a config claims.

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
    found = model_of(config)
    if found is None:
        return None
    kind, own = found
    table = TABLES[kind]
    sizes, notes = read_sizes(table, own)
    return Architecture(kind, table, own, sizes, bool(tie_of(config).tied), has_head(config), notes)


SHOWN = 8  # numbers of layers or experts that a list names


@dataclass(frozen=True, slots=True)
class Missing:
    """What a checkpoint lacks: the name of the first, `of` what, and the numbers of layers or experts."""

    name: str
    what: str
    numbers: tuple[int, ...] = ()
    count: int = 1
    total: int = 1


class Inventory:
    """The tensors of a checkpoint in the rows of its architecture.

    `held`: prefixes of layers that hold a weight, and names of tensors. Work and memory are in proportion to
    them and to the table, whatever numbers the config has.
    """

    def __init__(self, architecture: Architecture, held: Iterable[str]) -> None:
        self.architecture = architecture
        self._model: dict[str, str] = {}
        self._layers: dict[int, set[str]] = defaultdict(set)
        self._experts: dict[tuple[int, str], set[int]] = defaultdict(set)
        self._first: Place | None = None
        self._predictors: dict[int, bool] = {}
        self._predicting: set[int] = set()
        for name in held:
            place = architecture.find(name)
            if place is None:
                self._see_predictor(name)
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
        """The numbers of the layers that are there."""
        return frozenset(self._layers)

    @property
    def plain_predictors(self) -> frozenset[int]:
        """Layers that the config has predict further words, and that hold nothing of what those do."""
        return frozenset(number for number, predicts in self._predictors.items() if not predicts)

    @property
    def undeclared_predictors(self) -> frozenset[int]:
        """Layers beyond the count that predict further words, by their names, unknown to the config."""
        return frozenset(self._predicting - self._predictors.keys())

    def spell(self, *names: str) -> tuple[str, ...]:
        """Names of matrices that there are once, as this checkpoint writes them."""
        rows = [row for row in self.architecture.table.rows if row.name in names]
        return tuple(self._named(next(row for row in rows if row.name == name)) for name in names)

    def name_of_layer(self, layer: int) -> str:
        """`model.layers.3`, as this checkpoint writes it."""
        row = next(row for row in self.architecture.table.rows if "{layer}" in row.name)
        return self._named(row, layer).partition(f".{layer}.")[0] + f".{layer}"

    def lost_layers(self) -> tuple[tuple[int, ...], int]:
        """The first numbers of layers that the config counts and that are not there, and how many."""
        return absent(self.architecture.layers or 0, self.layers)

    def missing(self) -> Iterator[Missing]:
        """What is lacking beside whole layers: of the model, of layers, experts."""
        for row in self.architecture.table.rows:
            if self.architecture.is_needed(row, None) and not self._has_model(row):
                yield Missing(self._named(row), "the model")
        yield from self._lost_experts()
        for row in self.architecture.table.rows:
            if "{layer}" in row.name:
                yield from (self._of_experts if "{expert}" in row.name else self._of_layers)(row)

    @cached_property
    def _counted(self) -> list[int]:
        """The layers that are there and that the config counts, in order."""
        count = self.architecture.layers
        return [] if count is None else sorted(layer for layer in self._layers if layer < count)

    def _see_predictor(self, name: str) -> None:
        number, predicts = self.architecture.predictor(name), not PREDICTING.isdisjoint(name.split("."))
        if number is not None:
            self._predictors[number] = self._predictors.get(number, False) or predicts
        elif predicts:
            layer, count = self.architecture.layer(name), self.architecture.layers
            if layer is not None and count is not None and layer >= count:
                self._predicting.add(layer)

    def _has_model(self, row: Row) -> bool:
        names, table = {row.name}, self.architecture.table
        if self.architecture.tied and row.name == table.embedding:
            names.add(table.head)  # either of the two holds both
        return any(key in self._model for name in names for key in row_keys(name))

    def _of_layers(self, row: Row) -> Iterator[Missing]:
        needed = [layer for layer in self._counted if self.architecture.is_needed(row, layer)]
        accepted = {key for name in (row.name, *row.within) for key in row_keys(name)}
        lost = [layer for layer in needed if accepted.isdisjoint(self._layers[layer])]
        if lost:
            yield Missing(self._named(row, lost[0]), "layers", tuple(lost[:SHOWN]), len(lost), len(needed))

    def _of_experts(self, row: Row) -> Iterator[Missing]:
        """Experts of which others of their matrices are there."""
        lost = []
        for layer in self._counted:
            if self.architecture.is_needed(row, layer) and not self._is_stacked(row, layer):
                known = {
                    expert for key in row_keys(row.name) for expert in self._experts.get((layer, key), ())
                }
                lost += [(layer, expert) for expert in sorted(self._there[layer] - known)]
        if lost:
            name = self._named(row, *lost[0])
            yield Missing(name, "experts", tuple(expert for _, expert in lost[:SHOWN]), len(lost), len(lost))

    def _lost_experts(self) -> Iterator[Missing]:
        """Whole experts, layer by layer."""
        rows = [row for row in self.architecture.table.rows if "{expert}" in row.name]
        count = self.architecture.sizes.get("experts") or 0
        for layer in self._counted if rows else ():
            needed = [row for row in rows if self.architecture.is_needed(row, layer)]
            if not needed or all(self._is_stacked(row, layer) for row in needed):
                continue
            first, lost = absent(count, self._there[layer])
            if lost:
                name = self._named(needed[0], layer, first[0]).rpartition(".")[0]
                yield Missing(name, "experts", first, lost, count)

    @cached_property
    def _there(self) -> dict[int, set[int]]:
        """Of each layer the experts of which anything is there."""
        there: dict[int, set[int]] = defaultdict(set)
        for (layer, _), experts in self._experts.items():
            there[layer] |= experts
        return there

    def _is_stacked(self, row: Row, layer: int) -> bool:
        return any(key in self._layers[layer] for name in row.within for key in row_keys(name))

    def _named(self, row: Row, layer: int | None = None, expert: int | None = None) -> str:
        """The name in the words of this checkpoint, as far as they are known."""
        if layer is None and row_keys(row.name)[0] in self._model:
            return self._model[row_keys(row.name)[0]]
        name, first = spelled(row.name, layer, expert), self._first
        if first is None:
            return name
        return first.lead + (name.removeprefix(f"{self.architecture.table.base}.") if first.bare else name)


def absent(count: int, there: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Of the numbers below a count, the first that are not there, and how many are not; counts none out."""
    held = {number for number in there if number < count}
    first: list[int] = []
    number = 0
    while number < count and len(first) < min(SHOWN, count - len(held)):
        if number not in held:
            first.append(number)
        number += 1
    return tuple(first), count - len(held)
