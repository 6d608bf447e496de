"""Sibling layers as one line, `layers.{0..31}.self_attn.q_proj`, that spells no name that is not there."""

import math
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from qload.cli.text import NAME_LIMIT

T = TypeVar("T")
Parts = tuple[str | tuple[int, ...], ...]

INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Fold(Generic[T]):
    """Items that differ in the indices in their names alone; `first` speaks for all of them."""

    name: str
    count: int
    first: T


@dataclass(frozen=True)
class _Row(Generic[T]):
    parts: Parts
    kind: Hashable
    first: T


def fold(items: Iterable[T], *, name: Callable[[T], str], alike: Callable[[T], Hashable]) -> list[Fold[T]]:
    """Merge along one index after the other, innermost first, where all else agrees.

    Each result is a product of sets of indices, so every name that it spells is an item's.
    """
    rows = [_Row(_parts(name(item)), alike(item), item) for item in _in_order(items, name)]
    places = {at for row in rows for at, part in enumerate(row.parts) if isinstance(part, tuple)}
    for at in sorted(places, reverse=True):
        rows = _merge(rows, at)
    return [Fold(".".join(map(_spell, row.parts)), _count(row.parts), row.first) for row in rows]


def unfolded(items: Iterable[T], *, name: Callable[[T], str]) -> list[Fold[T]]:
    """Each item on its own."""
    return [Fold(name(item), 1, item) for item in _in_order(items, name)]


def _in_order(items: Iterable[T], name: Callable[[T], str]) -> list[T]:
    """layers.2 before layers.10."""

    def key(item: T) -> list[tuple[int, str]]:
        return [(-1, part) if isinstance(part, str) else (part[0], "") for part in _parts(name(item))]

    return sorted(items, key=key)


def _merge(rows: list[_Row[T]], at: int) -> list[_Row[T]]:
    siblings: dict[Hashable, list[_Row[T]]] = {}
    for number, row in enumerate(rows):
        indexed = at < len(row.parts) and isinstance(row.parts[at], tuple)
        key: Hashable = (row.parts[:at], row.parts[at + 1 :], row.kind) if indexed else number
        siblings.setdefault(key, []).append(row)
    return [group[0] if len(group) == 1 else _joined(group, at) for group in siblings.values()]


def _joined(group: list[_Row[T]], at: int) -> _Row[T]:
    parts, first = group[0].parts, group[0].first
    indices = tuple(index for row in group for index in row.parts[at] if isinstance(index, int))
    return _Row((*parts[:at], indices, *parts[at + 1 :]), group[0].kind, first)


def _parts(name: str) -> Parts:
    if len(name) > NAME_LIMIT:
        return (name,)
    return tuple((int(part),) if INDEX.fullmatch(part) else part for part in name.split("."))


def _count(parts: Parts) -> int:
    return math.prod(len(part) for part in parts if isinstance(part, tuple))


def _spell(part: str | tuple[int, ...]) -> str:
    """(3,) -> '3'; (0, 1, 2, 5) -> '{0..2,5}'."""
    if isinstance(part, str):
        return part
    if len(part) == 1:
        return str(part[0])
    runs: list[list[int]] = []
    for index in sorted(part):
        if runs and runs[-1][1] + 1 == index:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"
