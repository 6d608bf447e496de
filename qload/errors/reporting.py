"""Parts of every report: verdicts with their exit codes, and messages grouped by cause."""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
Parts = tuple[str | tuple[int, ...], ...]  # of a name at its dots; indices as tuples

Verdict = Literal["unreadable", "findings", "internal", "incomplete", "unsupported", "ok"]
SCHEMA = 2  # version of the printed JSON
# Verdict -> exit code, in order of precedence: a report has the first verdict that holds.
EXIT_CODES: Mapping[Verdict, int] = {
    "unreadable": 1,
    "findings": 1,
    "internal": 3,
    "incomplete": 4,
    "unsupported": 4,
    "ok": 0,
}
WORST_FIRST = (2, 3, 1, 4, 0)  # exit codes of several paths, in order of precedence
# A dotted name, a file name, or a number.
NAME_OR_NUMBER = re.compile(r"[\w\-]+(?:\.[\w\-]+)+|(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?\b")
NAME_PLACEHOLDER = "\0"  # of a removed name
STAR_LIST = re.compile(r"\*(?:(?:, | and | or | x )\*)*,?(?=\))|\*(?:(?:, | and | or | x )\*)+")
LAYER_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
MAX_NAME_CHARACTERS = 300  # a longer name is not split at its dots
MAX_NAME_LINES = 8


def qload_version() -> str:
    """Return the version of qload; "" for a source tree that is not installed."""
    try:
        return metadata.version("qload-weights")
    except metadata.PackageNotFoundError:
        return ""


def worst_code(codes: Iterable[int]) -> int:
    """Combine the exit codes of several paths; 0 for no path."""
    unique = set(codes)
    return next((code for code in WORST_FIRST if code in unique), max(unique, default=0))


def cause_of(message: str, *names: str | None) -> str:
    """Reduce a message to its cause, a text that is equal for findings of one cause.

    The `names` of the tensor, its layer and its file are removed; other names of tensors and files, and
    numbers, become stars.

    Examples
    --------
    >>> cause_of("model.layers.3.up.scales: NaN scale at (3, 4); 17 in all", "model.layers.3.up.scales")
    'NaN scale at (*); * in all'
    """
    for name in sorted(filter(None, names), key=len, reverse=True):
        message = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)(?:\.(?=\w))?", NAME_PLACEHOLDER, message)
    text = NAME_OR_NUMBER.sub(_replace_by_star, message).removeprefix(f"{NAME_PLACEHOLDER}: ")
    return " ".join(STAR_LIST.sub("*", text.replace(NAME_PLACEHOLDER, "*")).split())


def _replace_by_star(found: re.Match[str]) -> str:
    """Replace a number, a tensor of a numbered layer, or a file of tensors by a star; keep other words."""
    word = found[0]
    if word.endswith(".safetensors") or any(part.isdecimal() for part in word.split(".")):
        return "*"
    return "*" if re.fullmatch(r"[-+]?\d.*", word) else word


@dataclass(frozen=True)
class CauseGroup(Generic[T]):
    """Items of one cause, such as findings, and the names of their places.

    Attributes
    ----------
    items
        The items in their original order.
    names
        Distinct names of the places; siblings are not merged.
    """

    items: tuple[T, ...]
    names: tuple[str, ...]

    @property
    def first(self) -> T:
        """The first item, an example of the group."""
        return self.items[0]

    @property
    def count(self) -> int:
        """Number of places."""
        return len(self.names)

    def places(self, limit: int | None = MAX_NAME_LINES) -> list[str]:
        """List the places with merged indices, such as `layers.{0..31}.up_proj`.

        Above `limit` lines the last line counts the rest; None lists all.
        """
        if self.count <= 1:
            return list(self.names)
        rows = group_rows(self.names, name=str, key=lambda _: None)
        if limit is None or len(rows) <= limit:
            return [row.name for row in rows]
        rest = sum(row.count for row in rows[limit - 1 :])
        return [*(row.name for row in rows[: limit - 1]), f"and {rest} more"]


def group_by_cause(
    items: Iterable[T], *, name: Callable[[T], str], cause: Callable[[T], Hashable]
) -> list[CauseGroup[T]]:
    """Group items by their cause, in the order of the first item of each.

    Examples
    --------
    >>> errors = {"layers.0.up": "NaN", "layers.1.up": "NaN", "head": "empty"}
    >>> [group.places() for group in group_by_cause(errors, name=str, cause=errors.get)]
    [['layers.{0..1}.up'], ['head']]
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(cause(item), []).append(item)
    return [
        CauseGroup(tuple(group), tuple(dict.fromkeys(filter(None, map(name, group)))))
        for group in groups.values()
    ]


def group_texts(texts: Iterable[str]) -> list[str]:
    """Group texts that differ only in names and numbers: the first text, and the number of the others.

    Examples
    --------
    >>> group_texts(["l.0.up: error 0.1", "l.1.up: error 0.2", "no config"])
    ['l.0.up: error 0.1\\n(1 more like it)', 'no config']
    """
    groups = group_by_cause(texts, name=str, cause=cause_of)
    counts = [len(group.items) - 1 for group in groups]
    return [
        f"{group.first}\n({more} more like it)" if more else group.first
        for group, more in zip(groups, counts, strict=True)
    ]


@dataclass(frozen=True)
class RowGroup(Generic[T]):
    """Items whose names differ only in indices, and the first of them."""

    name: str
    count: int
    first: T


@dataclass(frozen=True)
class _Row(Generic[T]):
    parts: Parts
    key: Hashable
    first: T


def group_rows(
    items: Iterable[T], *, name: Callable[[T], str], key: Callable[[T], Hashable] | None
) -> list[RowGroup[T]]:
    """Group items with equal keys and names that differ only in indices, one index after the other.

    The indices of a group are a product of sets: every name that the group spells belongs to an item.
    Without a key each item is a group.
    """
    ordered = _sort_by_name(items, name)
    if key is None:
        return [RowGroup(name(item), 1, item) for item in ordered]
    rows = [_Row(_split_name(name(item)), key(item), item) for item in ordered]
    depths = {depth for row in rows for depth, part in enumerate(row.parts) if isinstance(part, tuple)}
    for depth in sorted(depths, reverse=True):
        rows = _merge_rows(rows, depth)
    return [
        RowGroup(".".join(map(_format_part, row.parts)), _count_names(row.parts), row.first) for row in rows
    ]


def _sort_by_name(items: Iterable[T], name: Callable[[T], str]) -> list[T]:
    """Sort indices as numbers: layers.2 before layers.10."""

    def sort_key(item: T) -> list[tuple[int, str]]:
        return [(-1, part) if isinstance(part, str) else (part[0], "") for part in _split_name(name(item))]

    return sorted(items, key=sort_key)


def _merge_rows(rows: list[_Row[T]], depth: int) -> list[_Row[T]]:
    """Merge rows that differ only in the index at a depth of the name."""
    siblings: dict[Hashable, list[_Row[T]]] = {}
    for number, row in enumerate(rows):
        indexed = depth < len(row.parts) and isinstance(row.parts[depth], tuple)
        key: Hashable = (row.parts[:depth], row.parts[depth + 1 :], row.key) if indexed else number
        siblings.setdefault(key, []).append(row)
    return [group[0] if len(group) == 1 else _join_rows(group, depth) for group in siblings.values()]


def _join_rows(group: list[_Row[T]], depth: int) -> _Row[T]:
    parts, first = group[0].parts, group[0].first
    indices = tuple(index for row in group for index in row.parts[depth] if isinstance(index, int))
    return _Row((*parts[:depth], indices, *parts[depth + 1 :]), group[0].key, first)


def _split_name(name: str) -> Parts:
    if len(name) > MAX_NAME_CHARACTERS:
        return (name,)
    return tuple((int(part),) if LAYER_INDEX.fullmatch(part) else part for part in name.split("."))


def _count_names(parts: Parts) -> int:
    return math.prod(len(part) for part in parts if isinstance(part, tuple))


def _format_part(part: str | tuple[int, ...]) -> str:
    """Format the indices of a part: (3,) -> '3'; (0, 1, 2, 5) -> '{0..2,5}'."""
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
