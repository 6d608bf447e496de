"""The one loader that serves every format: it knows declarations, and no format by name."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from qload.errors import ArgumentError
from qload.loader.base import Part, Split, WeightsLoader
from qload.loader.cuts import Share, share
from qload.loader.source import TensorSource
from qload.loader.study import Room, Studied, check_alike, study
from qload.spec import Layer, TensorSpec, Weight


class FormatLoader(WeightsLoader):
    """Loads every layer in whichever of its formats the layer's tensors are stored."""

    def __init__(self, *rooms: Room) -> None:
        self.rooms = rooms

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        """(N, K) of the layer stored under a prefix."""
        layer = self.study(weights, prefix)
        return layer.N, layer.K

    def study(self, weights: TensorSource, prefix: str) -> Studied:
        """All that headers and facts tell about a layer; reads no weight."""
        return study(weights, prefix, self.rooms)

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """The parts joined along N, sliced before they are read, checked before they are sliced."""
        layers = {part.prefix: self.study(weights, part.prefix) for part in parts}
        if len(layers) < len(parts) and any(part.stop is None for part in parts):
            raise ArgumentError("prefixes", "each layer once", ", ".join(part.prefix for part in parts))
        check_alike(list(layers.values()))
        shares = [
            share(layers[part.prefix], part, split, weights.process_group, joined=part is not parts[-1])
            for part in parts
        ]
        first = shares[0]
        tensors = {spec.name: _read(weights, spec, shares) for spec in first.layer.specs}
        widths = [(layers[p.prefix].N if p.stop is None else p.stop) - p.start for p in parts]
        layer = Layer(
            parts=tuple(s.n1 - s.n0 for s in shares),
            K=first.k1 - first.k0,
            whole=(sum(widths), first.layer.K),
            name=", ".join(layers),
        )
        room = first.layer.room
        weight: Weight = room.weight(config=room.config, layer=layer, **tensors)
        for studied in layers.values():
            for note in studied.notes:
                weights.note(f"{studied.prefix}: {note}")
        weights.take(studied.names.full(spec.name) for studied in layers.values() for spec in studied.specs)
        return weight

    def with_config(self, **changes: Any) -> "FormatLoader":
        """The same loader, its first format's config changed, as `zeros=StoredMinusOneUnmasked()`."""
        first, *rest = self.rooms
        known = [field.name for field in fields(first.config)]
        if not changes.keys() <= set(known):
            settings = f"settings of {first.weight.format}: {', '.join(known)}"
            raise ArgumentError("changes", settings, ", ".join(changes))
        return FormatLoader(replace(first, config=replace(first.config, **changes)), *rest)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{r.weight.format}: {r.config}' for r in self.rooms)})"


def _read(weights: TensorSource, spec: TensorSpec, shares: Sequence[Share]) -> Tensor:
    """One tensor of the layer, its parts joined along their N axis, or the first where it has none."""
    join = spec.axis_of("N")
    if join is None or len(shares) == 1:
        return _slice(weights, spec, shares[0])
    first = _slice(weights, spec, shares[0])
    extents = [_extent(spec, one, join) for one in shares]
    whole = first.new_empty([*first.shape[:join], sum(extents), *first.shape[join + 1 :]])
    at = 0
    for one, extent in zip(shares, extents, strict=True):
        part = first if at == 0 else _slice(weights, spec, one)
        whole.narrow(join, at, extent).copy_(part)
        at += extent
    return whole


def _extent(spec: TensorSpec, share: Share, axis: int) -> int:
    piece = share.piece(spec.axes[axis])
    return piece[1] - piece[0] if piece else 0


def _slice(weights: TensorSource, spec: TensorSpec, share: Share) -> Tensor:
    pieces = [share.piece(axis) for axis in spec.axes]
    index = tuple(slice(None) if piece is None else slice(*piece) for piece in pieces)
    name = share.layer.names.full(spec.name)
    if not spec.fact:
        return weights.read(name, index, role=spec.role)
    fact = share.layer.facts[spec.name][index].clone()
    return fact - _first(spec.index_of, share) if spec.index_of else fact


def _first(letter: str, share: Share) -> int:
    """Where this rank's piece of a free axis begins, which an index into it counts from."""
    cut = (share.piece(axis) for spec in share.layer.specs for axis in spec.axes if axis.free == letter)
    return next((piece[0] for piece in cut if piece), 0)
