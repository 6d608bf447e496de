"""Modules listed in a config by name: excluded from quantization, or quantized.

An entry excludes the layers with its segments in a row in their dotted name: `layers.1` excludes
`model.layers.1.mlp.up_proj` and not `model.layers.10.mlp.up_proj`. An entry with further segments in front,
`language_model.model.layers.1` for `model.layers.1`, means the same layer. A dot at an end of an entry, which
separates `mlp.gate.` from `mlp.gate_proj` for other readers, is ignored. A fused layer is excluded if all of
its parts are, and a part if its fused layer is. The pattern `*v_proj` selects one part, although it matches
`qkv_proj` too.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import takewhile

from qload.errors import ArgumentError, MismatchError

# Last segment of an engine's fused layer -> last segments of its parts in checkpoints.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# Last segment of an expert's layer -> other names of the stacked matrix that contains it.
STACKED: Mapping[str, tuple[str, ...]] = {
    "gate_proj": ("gate_up_proj", "gate_up", "input_linear"),
    "up_proj": ("gate_up_proj", "gate_up", "input_linear"),
    "down_proj": ("output_linear",),
    "w1": ("w13",),
    "w3": ("w13",),
}


def parts(prefix: str, fused: Iterable[tuple[str, tuple[str, ...]]] = FUSED.items()) -> list[str]:
    """Parts of a fused layer; empty for any other layer."""
    own = prefix.rpartition(".")[2]
    return [_sibling(prefix, part) for part in dict(fused).get(own, ())]


def wholes(prefix: str, fused: Iterable[tuple[str, tuple[str, ...]]] = FUSED.items()) -> list[str]:
    """Fused layers with this layer as a part."""
    own = prefix.rpartition(".")[2]
    return [_sibling(prefix, whole) for whole, own_parts in fused if own in own_parts]


def selects_module(
    selects: Callable[[str], bool], name: str, fused: Iterable[tuple[str, tuple[str, ...]]] = FUSED.items()
) -> bool:
    """Return whether a predicate on names selects a module; a fused layer only if it means no single part."""
    return selects(name) and len(set(map(selects, parts(name, fused)))) < 2


def stacks(prefix: str) -> list[str]:
    """Names of the stacked matrices that may contain a layer of one expert."""
    module, _, last = prefix.rpartition(".")
    lead, _, number = module.rpartition(".")
    if not lead or not number.isdecimal():
        return []
    return [f"{lead}.{name}" for name in (last, *STACKED.get(last, ()))]


def check_agreed(prefix: str, said: Mapping[str, str], key: str) -> None:
    """MismatchError for different claims of a config about the parts of a fused layer.

    `said`: claim in words by part.
    """
    first = next((part for part in said if said[part] == LEFT_OUT), next(iter(said)))
    other = next((part for part in said if said[part] != said[first]), None)
    if other is not None:
        raise MismatchError(
            prefix,
            "fused of layers that are not all quantized or all left out"
            if LEFT_OUT in said.values()
            else "fused of layers that are not quantized alike",
            f"{' and '.join(said)} alike in {key}",
            f"{first} {said[first]}, {other} {said[other]}",
        )


LEFT_OUT = "left out"  # claim of a config about an excluded layer


@dataclass(frozen=True)
class Exclusions:
    """Names of the modules that a config excludes, and the key with the list."""

    names: tuple[str, ...] = ()
    key: str = "modules_to_not_convert"
    fused: tuple[tuple[str, tuple[str, ...]], ...] = tuple(FUSED.items())

    def __post_init__(self) -> None:
        for name in self.names:
            if self._is_name(name) and "" in name.strip(".").split("."):
                raise ArgumentError(self.key, "dotted names without an empty segment", repr(name))

    @property
    def is_empty(self) -> bool:
        """True if no layer is excluded."""
        return not self.names

    def entry(self, prefix: str) -> str | None:
        """Entry that excludes a layer, its fused layer or all its parts; None without one; MismatchError."""
        for name in (prefix, *wholes(prefix, self.fused)):
            found = self._entry(name)
            if found is not None:
                return found
        entries = {part: self._entry(part) for part in parts(prefix, self.fused)}
        if entries:
            said = {part: "not" if entry is None else LEFT_OUT for part, entry in entries.items()}
            check_agreed(prefix, said, self.key)
        return next(iter(entries.values()), None)

    def reason(self, entry: str) -> str:
        """Reason for an exclusion by an entry."""
        return f"{self.key} has {entry!r:.80}"

    def remedy(self, entry: str) -> str:
        """Remedy for a quantized layer that an entry excludes."""
        return f"take the entry out of {self.key}, or store the layer plain"

    def _is_name(self, entry: str) -> bool:
        """Return True for a dotted name, False for a pattern."""
        return True

    def selects(self, module: str) -> bool:
        """Return whether an entry selects a module by its own name."""
        return self._entry(module) is not None

    def _entry(self, prefix: str) -> str | None:
        if not self.names:
            return None
        place = self._first_name(prefix)
        for at in self._patterns if place is None else takewhile(place.__gt__, self._patterns):
            if selects_module(partial(self._knows, self.names[at]), prefix, self.fused):
                return self.names[at]
        return None if place is None else self.names[place]

    @cached_property
    def _patterns(self) -> tuple[int, ...]:
        """Numbers of the patterns among the entries."""
        return tuple(at for at, entry in enumerate(self.names) if not self._is_name(entry))

    @cached_property
    def _dotted(self) -> "_DottedNames":
        return _DottedNames({at: entry for at, entry in enumerate(self.names) if self._is_name(entry)})

    def _first_name(self, prefix: str) -> int | None:
        """Number of the first dotted name for a layer of exactly this name."""
        return self._dotted.first(prefix)

    def _knows(self, entry: str, prefix: str) -> bool:
        """Return True if a pattern matches a layer's own name; the base class has no patterns."""
        return False


@dataclass(frozen=True)
class Inside(Exclusions):
    """The only quantized modules of a block (with a number in its name); `others` are excluded too."""

    key: str = "modules_in_block_to_quantize"
    others: Exclusions = Exclusions()

    @property
    def is_empty(self) -> bool:
        """False: modules without an entry are excluded."""
        return False

    def reason(self, entry: str) -> str:
        """Reason for an exclusion: an entry of `others`, or no entry in this list."""
        return self.others.reason(entry) if entry in self.others.names else f"{self.key} does not name it"

    def remedy(self, entry: str) -> str:
        """Remedy by the list with the entry, else by the list without a module of this name."""
        named = entry in self.others.names
        return self.others.remedy(entry) if named else f"name the module in {self.key}, or store it plain"

    def entry(self, prefix: str) -> str | None:
        """Entry that excludes a layer, or None; MismatchError for a fused layer with differing parts."""
        out = self.others.entry(prefix)
        if out is not None or not any(segment.isdecimal() for segment in prefix.split(".")):
            return out
        if any(self._entry(name) is not None for name in (prefix, *wholes(prefix, self.fused))):
            return None
        named = {part: self._entry(part) is not None for part in parts(prefix, self.fused)}
        if named:
            said = {part: "not" if there else LEFT_OUT for part, there in named.items()}
            check_agreed(prefix, said, self.key)
        return None if any(named.values()) else prefix


def _sibling(prefix: str, own: str) -> str:
    parent = prefix.rpartition(".")[0]
    return f"{parent}.{own}" if parent else own


class _DottedNames:
    """Entries by their segments, for lookups in constant time."""

    def __init__(self, entries: Mapping[int, str]) -> None:
        self._runs: dict[tuple[str, ...], int] = {}
        for place, entry in entries.items():
            self._runs.setdefault(tuple(entry.strip(".").split(".")), place)
        self._endings: dict[int, dict[tuple[str, ...], int]] = {}  # by length, on demand
        self._lengths = sorted({len(segments) for segments in self._runs})

    def first(self, prefix: str) -> int | None:
        """Number of the first entry within a name, or with further segments in front of it."""
        segments = tuple(prefix.split("."))
        runs = (
            segments[start : start + length]
            for length in self._lengths
            for start in range(len(segments) - length + 1)
        )
        found = [self._runs[run] for run in runs if run in self._runs]
        ends = self._ends(len(segments))
        found += [ends[segments]] if segments in ends else []
        return min(found, default=None)

    def _ends(self, length: int) -> Mapping[tuple[str, ...], int]:
        """Last `length` segments of each longer entry, with the number of the first entry that has them."""
        if length not in self._endings:
            ends = self._endings[length] = dict[tuple[str, ...], int]()
            for entry, place in self._runs.items():
                if len(entry) > length:
                    ends.setdefault(entry[-length:], place)
        return self._endings[length]


Entry = tuple[str, str]  # name of a module, and key of the list


@dataclass(frozen=True)
class NamedModules:
    """Modules listed by name as quantized: name -> key of the list in the config.

    `leaving_out`: how to exclude a module in a config of this method.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    leaving_out: str = "modules_to_not_convert"

    def entry(self, prefix: str) -> Entry | None:
        """Find the entry for a layer or for its module of experts; None without one.

        A name in the config may lack leading segments: `lm_head` stands for `language_model.lm_head` too.
        """
        if not self.keys:
            return None
        segments = prefix.split(".")
        numbers = (at for at, part in enumerate(segments) if part.isdecimal())
        experts = (at for at in numbers if segments[at - 1].endswith("experts"))
        for stop in (len(segments), *experts):
            for start in range(stop):
                name = ".".join(segments[start:stop])
                if name in self.keys:
                    return name, self.keys[name]
        return None

    def note(self, prefix: str) -> str | None:
        """Note on a plain layer with an entry; None without an entry."""
        entry = self.entry(prefix)
        if entry is None:
            return None
        return (
            f"{entry[1]} lists it as quantized, and its weight is plain: programs that follow the config "
            "expect quantized tensors and fail; correct that entry, or exclude the layer by "
            f"{self.leaving_out}"
        )


NOTHING_NAMED = NamedModules()
