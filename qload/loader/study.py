"""What a layer is, from headers and facts alone: its format, sizes and declaration, all checked."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qload.errors import MismatchError, ShapeError, TwoFormatsError
from qload.loader.source import TensorSource
from qload.spec import PARTS, Config, Names, Seen, Shape, TensorSpec, Weight, named


@dataclass(frozen=True)
class Room:
    """A format with the config that its files gave."""

    weight: type[Weight]
    config: Config

    def specs(self) -> tuple[TensorSpec, ...]:
        """The declaration before any layer was looked at."""
        return self.weight.tensors(self.config)


@dataclass(frozen=True)
class Stored(Names):
    """A layer's names in messages: prefix and on-disk suffix, and the file."""

    weights: TensorSource
    prefix: str
    suffixes: Mapping[str, str]

    def full(self, field: str) -> str:
        """`qweight` -> `layers.0.q_proj.qweight`."""
        return named(self.prefix, self.suffixes[field])

    def file(self, field: str) -> str | None:
        """The file whose header lists it."""
        return self.weights.info(self.full(field)).file


@dataclass(frozen=True)
class Studied:
    """A layer before any of its weights is read."""

    prefix: str
    room: Room  # with the layer's own config
    specs: tuple[TensorSpec, ...]  # of the tensors that are there
    sizes: Mapping[str, int]
    facts: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    names: Names
    notes: Sequence[str] = ()  # where a claim disagreed without harm

    @cached_property
    def N(self) -> int:
        """Outputs of the whole layer."""
        return self.sizes["N"]

    @cached_property
    def K(self) -> int:
        """Inputs of the whole layer; 1 for a vector."""
        return self.sizes.get("K", 1)


def study(weights: TensorSource, prefix: str, rooms: Sequence[Room]) -> Studied:
    """Tell the format by the tensors, read the facts, check shapes, dtypes and indices."""
    room = _choose(weights, prefix, rooms)
    names = Stored(weights, prefix, {spec.name: _one_suffix(weights, prefix, spec) for spec in room.specs()})
    specs = tuple(
        spec for spec in room.specs() if not spec.optional or weights.has_tensor(names.full(spec.name))
    )
    infos = {spec.name: weights.info(names.full(spec.name)) for spec in specs}
    facts = {spec.name: weights.read(names.full(spec.name), role=spec.role) for spec in specs if spec.fact}
    seen = Seen(
        shapes={spec.name: _shape(spec, infos[spec.name].shape) for spec in specs},
        dtypes={name: info.dtype for name, info in infos.items()},
        facts=facts,
        names=names,
    )
    for spec in specs:
        if 0 in seen.shapes[spec.name] and any(axis.dim == PARTS for axis in spec.axes):
            full, got = names.full(spec.name), seen.shapes[spec.name]
            raise ShapeError(full, "(), or one entry a fused part", got, names.file(spec.name))
    own = Room(room.weight, room.config.study(seen))
    specs = tuple(spec for spec in own.specs() if spec.name in infos)
    sizes = seen.sizes(specs, own.config.known())
    return Studied(prefix, own, specs, sizes, facts, seen.dtypes, names, own.config.notes(seen))


def _suffixes(weights: TensorSource, prefix: str, spec: TensorSpec) -> list[str]:
    """Which of its names a tensor is stored under."""
    return [suffix for suffix in spec.suffixes if weights.has_tensor(named(prefix, suffix))]


def _one_suffix(weights: TensorSource, prefix: str, spec: TensorSpec) -> str:
    """The name that a tensor is stored under; the first where it is not stored at all; TwoFormatsError."""
    found = _suffixes(weights, prefix, spec)
    if len(found) > 1:
        raise TwoFormatsError(
            named(prefix, found[0]),
            "stored under two names, which has two readings",
            f"either {' or '.join(found)}",
            " and ".join(found),
        )
    return found[0] if found else spec.suffix


def _shape(spec: TensorSpec, stored: Shape) -> Shape:
    """() is (1,) where one entry a part is declared."""
    return (1,) if stored == () and [axis.dim for axis in spec.axes] == [PARTS] else stored


def check_alike(layers: Sequence[Studied]) -> None:
    """Layers that are to be fused agree in all that their join cannot carry, or MismatchError."""
    first = layers[0]
    for other in layers[1:]:
        for what, a, b in (
            ("parts of a fused layer differ in format", first.room.weight.format, other.room.weight.format),
            ("parts of a fused layer differ in K", first.K, other.K),
            ("parts of a fused layer differ in tensors", list(first.dtypes), list(other.dtypes)),
            ("parts of a fused layer differ in config", *_apart(first.room.config, other.room.config)),
        ):
            if a != b:
                raise _differ(first, other, what, a, b)
        kept = {spec.name for spec in first.specs if not spec.spent}
        for name, dtype in first.dtypes.items():
            if name in kept and dtype != other.dtypes[name]:
                raise _differ(
                    first,
                    other,
                    f"parts of a fused layer differ in the dtype of {name}",
                    dtype,
                    other.dtypes[name],
                )
        for name, fact in first.facts.items():
            if name in kept and not torch.equal(fact, other.facts[name]):
                raise _differ(first, other, *_facts_apart(name, fact, other.facts[name]))


def _facts_apart(name: str, a: Tensor, b: Tensor) -> tuple[str, Any, Any]:
    """What two facts that are not equal do not agree in: their lengths, or the first entry that differs."""
    if a.shape != b.shape:
        return f"parts of a fused layer differ in the shape of {name}", tuple(a.shape), tuple(b.shape)
    row = int((a != b).nonzero()[0, 0])
    return f"parts of a fused layer differ in {name}, from row {row} on", a[row].tolist(), b[row].tolist()


def _choose(weights: TensorSource, prefix: str, rooms: Sequence[Room]) -> Room:
    """The format whose tensors a layer has, or MissingTensorError, or TwoFormatsError.

    Of formats that share names the one that explains more of what is there; of those that explain the
    same, the one that lacks nothing, or whose dtypes these are.
    """
    present = {
        room: frozenset(
            suffix
            for spec in room.specs()
            for suffix in spec.suffixes
            if weights.has_tensor(named(prefix, suffix))
        )
        for room in rooms
    }
    found = [room for room, suffixes in present.items() if suffixes]
    most = [room for room in found if not any(present[room] < present[other] for other in found)]
    if len({present[room] for room in most}) > 1:
        a, b = most[:2]
        raise TwoFormatsError(
            prefix,
            "stored in two formats at once",
            f"either {a.weight.format} or {b.weight.format}",
            f"{', '.join(sorted(present[a]))} and {', '.join(sorted(present[b]))}",
        )
    fitting = [room for room in most if _fits(weights, prefix, room)]
    room = next(
        (room for room in fitting if not _missing(room, present[room])),
        (fitting or most or list(rooms))[0],
    )
    missing = _missing(room, present.get(room, frozenset()))
    if missing:
        looked = f"formats  looked for {' and '.join(room.weight.format for room in rooms)}"
        raise weights.missing(named(prefix, missing[0].suffix), missing[0].reason if found else looked)
    return room


def _missing(room: Room, present: Collection[str]) -> list[TensorSpec]:
    """What a layer of this format has to have, and these are not."""
    return [
        spec
        for spec in room.specs()
        if not spec.optional and not any(suffix in present for suffix in spec.suffixes)
    ]


def _fits(weights: TensorSource, prefix: str, room: Room) -> bool:
    """Whether the tensors that are there have dtypes of this format."""
    return all(
        weights.info(named(prefix, suffix)).dtype in spec.dtypes
        for spec in room.specs()
        for suffix in _suffixes(weights, prefix, spec)
    )


def _differ(first: Studied, other: Studied, what: str, a: Any, b: Any) -> MismatchError:
    return MismatchError(
        other.prefix,
        what,
        f"{_plain(a)} as in {first.prefix}",
        _plain(b),
        "remedy   load them as layers of their own",
    )


def _apart(a: Config, b: Config) -> tuple[str, str]:
    """What two configs of one format do not agree in."""
    alike = fields(a) if type(a) is type(b) else ()
    names = [f.name for f in alike if f.compare and getattr(a, f.name) != getattr(b, f.name)]
    one, two = (", ".join(f"{n} = {getattr(config, n)}" for n in names) for config in (a, b))
    return one, two


def _plain(value: Any) -> str:
    return str(value).removeprefix("torch.")
