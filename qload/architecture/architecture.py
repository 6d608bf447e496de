"""`Architecture`: the matrices of a model, their names and shapes, as its config tells them."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

from qload.architecture.config import has_head, model_of, read_flag, read_list, read_sizes, tie_of
from qload.architecture.expressions import names as named_in
from qload.architecture.expressions import value
from qload.architecture.names import Place, find, rows_by_key, spelled, tails
from qload.architecture.table import LISTS, Lists, Row, Table
from qload.architecture.tables import TABLES
from qload.errors import checked
from qload.loader import Heads

# The last parts of the names of matrices that multiply the same input, of one parent each.
SHARED = (
    ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
RECENT = 256  # names
PADDINGS = (8, 16, 32, 64, 128, 256, 512, 1024)  # programs pad vocabularies to a multiple of one of these


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
        return frozenset(-(-vocabulary // block) * block for block in PADDINGS)

    def said(self, prefix: str) -> str:
        """(N, K) of a matrix, or the shape of a tensor, in the words of the config, by `prefix` or name."""
        place = self.find(prefix)
        return "" if place is None else ", ".join(map(self._in_words, place.row.shape.split()))

    def siblings(self, prefix: str) -> tuple[str, ...]:
        """The prefixes of all matrices that multiply the input of that under `prefix`, itself among them."""
        place = self.find(prefix)
        parent, dot, last = prefix.rpartition(".")
        group = next((group for group in SHARED if last in group), None)
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
        return lru_cache(RECENT)(partial(find, rows=self.rows, base=self.table.base))

    @cached_property
    def _size(self) -> Callable[[str], int | None]:
        """The value of each expression of the table, which are few."""
        return cache(partial(value, sizes=self.sizes))

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
