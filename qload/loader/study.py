"""What a layer is, from headers and facts alone: its format, sizes and declaration, all checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qload.errors import MismatchError, TwoFormatsError
from qload.loader.source import TensorSource
from qload.spec import Config, Names, Seen, TensorSpec, Weight, named


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
    names = Stored(weights, prefix, {spec.name: spec.suffix for spec in room.specs()})
    specs = tuple(
        spec for spec in room.specs() if not spec.optional or weights.has_tensor(names.full(spec.name))
    )
    infos = {spec.name: weights.info(names.full(spec.name)) for spec in specs}
    facts = {spec.name: weights.read(names.full(spec.name), role=spec.role) for spec in specs if spec.fact}
    seen = Seen(
        shapes={name: info.shape for name, info in infos.items()},
        dtypes={name: info.dtype for name, info in infos.items()},
        facts=facts,
        names=names,
    )
    own = Room(room.weight, room.config.study(seen))
    specs = tuple(spec for spec in own.specs() if spec.name in infos)
    return Studied(prefix, own, specs, seen.sizes(specs), facts, seen.dtypes, names, own.config.notes(seen))


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
        for name, dtype in first.dtypes.items():
            if dtype != other.dtypes[name]:
                raise _differ(
                    first,
                    other,
                    f"parts of a fused layer differ in the dtype of {name}",
                    dtype,
                    other.dtypes[name],
                )
        for name, fact in first.facts.items():
            if not torch.equal(fact, other.facts[name]):
                apart = int((fact != other.facts[name]).nonzero()[0, 0])
                raise _differ(
                    first,
                    other,
                    f"parts of a fused layer differ in {name}, from row {apart} on",
                    int(fact[apart]),
                    int(other.facts[name][apart]),
                )


def _choose(weights: TensorSource, prefix: str, rooms: Sequence[Room]) -> Room:
    present = {
        room: [spec.suffix for spec in room.specs() if weights.has_tensor(named(prefix, spec.suffix))]
        for room in rooms
    }
    found = [room for room, suffixes in present.items() if suffixes]
    if len(found) > 1:
        a, b = found[:2]
        raise TwoFormatsError(
            prefix,
            "stored in two formats at once",
            f"either {a.weight.format} or {b.weight.format}",
            f"{', '.join(present[a])} and {', '.join(present[b])}",
        )
    room = found[0] if found else rooms[0]
    for spec in room.specs():
        if not spec.optional and spec.suffix not in present[room]:
            hint = (
                "" if found else f"formats  looked for {' and '.join(room.weight.format for room in rooms)}"
            )
            raise weights.missing(named(prefix, spec.suffix), hint)
    return room


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
