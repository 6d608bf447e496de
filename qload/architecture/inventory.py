"""What of an architecture a checkpoint holds, and what it lacks: told by the names that are there."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from qload.architecture.architecture import Architecture
from qload.architecture.drafts import PREDICTING
from qload.architecture.names import Place, keys, spelled
from qload.architecture.table import Row

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
        return any(key in self._model for name in names for key in keys(name))

    def _of_layers(self, row: Row) -> Iterator[Missing]:
        needed = [layer for layer in self._counted if self.architecture.is_needed(row, layer)]
        accepted = {key for name in (row.name, *row.within) for key in keys(name)}
        lost = [layer for layer in needed if accepted.isdisjoint(self._layers[layer])]
        if lost:
            yield Missing(self._named(row, lost[0]), "layers", tuple(lost[:SHOWN]), len(lost), len(needed))

    def _of_experts(self, row: Row) -> Iterator[Missing]:
        """Experts of which others of their matrices are there."""
        lost = []
        for layer in self._counted:
            if self.architecture.is_needed(row, layer) and not self._is_stacked(row, layer):
                known = {expert for key in keys(row.name) for expert in self._experts.get((layer, key), ())}
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
        return any(key in self._layers[layer] for name in row.within for key in keys(name))

    def _named(self, row: Row, layer: int | None = None, expert: int | None = None) -> str:
        """The name in the words of this checkpoint, as far as they are known."""
        if layer is None and keys(row.name)[0] in self._model:
            return self._model[keys(row.name)[0]]
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
