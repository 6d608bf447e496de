"""Decisions by the values of a layer, beyond headers and facts; each layer is examined once."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from qload.errors import QloadError
from qload.loader.description import ConfiguredFormat, LayerDescription
from qload.loader.source import TensorSource, fact_of
from qload.spec import Config, Grouped, LayerClaims, Names, named

MAX_CHECKED_LAYERS = 2  # layers of a claim that are compared with it: it is wrong about all or none
MAX_SAMPLED_LAYERS = 256  # layers examined together if one alone is ambiguous
MAX_CACHED_LAYERS = 1 << 16  # layers

Describe = Callable[[TensorSource, str], LayerDescription]


def whole_source(source: TensorSource) -> TensorSource:
    """The innermost source, with all tensors as stored."""
    while (inner := getattr(source, "inner", None)) is not None:
        source = inner
    return source


class LayerDecisions:
    """Cache of decisions by values, for the layers of one source.

    `describe` reads the headers of a layer. `every`: compare every layer with the config, not the first ones
    of each claim alone.
    """

    def __init__(self, source: TensorSource, describe: Describe, *, every: bool) -> None:
        self._source, self._describe, self._every = ref(source), describe, every
        self._cache: dict[str, tuple[dict[str, Any], QloadError | None]] = {}
        self._formats: dict[Any, ConfiguredFormat] = {}
        self._checked: Counter[LayerClaims | None] = Counter()
        self._logged: set[str] = set()
        self.shared: dict[str, Any] = {}

    def belongs_to(self, source: TensorSource) -> bool:
        """Return whether the cache belongs to a source."""
        return self._source() is source

    def is_first(self, kind: str) -> bool:
        """Return True on the first call for a kind of message, which is logged once for all layers."""
        is_first = kind not in self._logged
        self._logged.add(kind)
        return is_first

    def settle(self, layer: LayerDescription) -> LayerDescription:
        """Update a layer's config by its values, and attach the error if they contradict claims."""
        decision = self._cache.get(layer.prefix)
        if decision is None:
            claims = layer.format.claims
            compare = self._every or self._checked[claims] < MAX_CHECKED_LAYERS
            values = StoredValues(self, layer, compare_codes=compare)
            with torch.device("cpu"):  # callers may have another default, such as "meta"
                decision = layer.format.config.settled(values)
            self._checked[claims] += values.codes_compared and decision[1] is None
            if len(self._cache) < MAX_CACHED_LAYERS:
                self._cache[layer.prefix] = decision
        changes, error = decision
        if not changes and error is None:
            return layer
        return replace(layer, format=self._format(layer.format, changes), contradiction=error)

    def layers_with(self, suffix: str) -> "Iterator[tuple[Config, StoredValues]]":
        """Yield the layers with a tensor of this suffix, in the order of their names."""
        source = self._source()
        keys: Iterable[str] = getattr(getattr(source, "storage", None), "keys", tuple)()
        for name in sorted(key for key in keys if key.endswith(f".{suffix}"))[:MAX_SAMPLED_LAYERS]:
            try:
                assert source is not None  # the calling layer keeps it alive
                layer = self._describe(source, name.removesuffix(f".{suffix}"))
            except QloadError:
                continue
            if layer.format.config.by_values and layer.format.claims is not None:
                yield layer.format.config, StoredValues(self, layer, compare_codes=False)

    def _format(self, fmt: ConfiguredFormat, changes: Mapping[str, Any]) -> ConfiguredFormat:
        """Share one format among layers with equal decisions."""
        key = id(fmt), tuple(changes.items())
        if key not in self._formats:
            self._formats[key] = replace(fmt, config=replace(fmt.config, **changes))
            self._formats[id(fmt), None] = fmt  # keeps `fmt` alive, and so its id unique
        return self._formats[key]


class StoredValues:
    """The values of a layer, as `qload.spec.LayerValues` describes them."""

    def __init__(self, decisions: LayerDecisions, layer: LayerDescription, *, compare_codes: bool) -> None:
        source = decisions._source()
        assert source is not None  # the layer keeps it alive
        self._decisions, self._layer, self._source = decisions, layer, source
        self._roles = {spec.name: spec.role for spec in layer.specs}
        self.compare_codes, self.codes_compared = compare_codes, False
        self.names: Names = layer.names
        self.shared = decisions.shared

    @property
    def claims(self) -> LayerClaims:
        """Claims of the config about the layer."""
        return self._layer.format.claims or LayerClaims()

    @property
    def rows_of_a_group(self) -> int:
        """Inputs of a group."""
        config = self._layer.format.config
        return config.rows_of_a_group(self._layer.K) if isinstance(config, Grouped) else self._layer.K

    def readable(self, field: str) -> tuple[tuple[int, int], ...] | None:
        """(start, stop) of the readable part along each axis; of files, the whole tensor."""
        name = self.names.full(field)
        part = getattr(getattr(self._source, "storage", None), "readable", None)
        if part is not None:
            found: tuple[tuple[int, int], ...] | None = part(name)
            return found
        return tuple((0, size) for size in self._source.info(name).shape)

    def read(self, field: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Elements of a tensor, on the CPU."""
        name, role = self.names.full(field), self._roles[field]
        shape = self._source.info(name).shape
        self.codes_compared |= self.compare_codes
        if all(part.indices(size)[:2] == (0, size) for part, size in zip(index, shape, strict=False)):
            return fact_of(self._source, name, role).cpu()
        return self._source.read(name, index, role=role).cpu()

    def group_of_rows(self, start: int, stop: int) -> Tensor:
        """The group of each input of a run."""
        config, facts = self._layer.format.config, self._layer.facts
        index = next((facts[name] for name in ("g_idx", "weight_g_idx") if name in facts), None)
        if index is None or getattr(config, "indexed", True) is False:
            assert isinstance(config, Grouped)
            index = config.in_order(self._layer.K)
        return index[start:stop].cpu().long()

    def layers(self, field: str) -> "Iterator[tuple[Config, StoredValues]]":
        """Yield the layers of the checkpoint with this field."""
        full = self.names.full(field)
        lead = named(self._layer.prefix, "")
        return self._decisions.layers_with(full.removeprefix(lead).lstrip("."))
