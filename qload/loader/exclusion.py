"""Which layers a quantization leaves out, by names: whole ones, never a part of one.

An entry excludes the layers in whose dotted name it stands as a run of whole segments: `layers.1` excludes
`model.layers.1.mlp.up_proj` and not `model.layers.10.mlp.up_proj`. An entry that only has more in front,
as `language_model.model.layers.1` beside `model.layers.1`, means the same layer. A dot at an end of an
entry is what other readers need to tell `mlp.gate.` from `mlp.gate_proj`, and says nothing here. A layer
that is fused out of several of the checkpoint's is excluded if all of these are, and with it all of these.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from qload.errors import ArgumentError, MismatchError

# What engines make of one layer and checkpoints of several, by the last segment of the name.
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
    """The layers that a fused one is made of; none of any other."""
    own = prefix.rpartition(".")[2]
    return [_sibling(prefix, part) for part in dict(fused).get(own, ())]


def wholes(prefix: str, fused: Iterable[tuple[str, tuple[str, ...]]] = FUSED.items()) -> list[str]:
    """The fused layers that a layer may become a part of."""
    own = prefix.rpartition(".")[2]
    return [_sibling(prefix, whole) for whole, made_of in fused if own in made_of]


def stacks(prefix: str) -> list[str]:
    """Names of the stacked matrices that may contain a layer of one expert."""
    module, _, last = prefix.rpartition(".")
    lead, _, number = module.rpartition(".")
    if not lead or not number.isdecimal():
        return []
    return [f"{lead}.{name}" for name in (last, *STACKED.get(last, ()))]


def check_agreed(prefix: str, said: Mapping[str, str], key: str) -> None:
    """A config says the same of all parts of a fused layer (`said`: in words), or MismatchError."""
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


LEFT_OUT = "left out"  # what a config can say of a layer


@dataclass(frozen=True)
class Exclusions:
    """The names that a config leaves out, and the key that lists them."""

    names: tuple[str, ...] = ()
    key: str = "modules_to_not_convert"
    fused: tuple[tuple[str, tuple[str, ...]], ...] = tuple(FUSED.items())

    def __post_init__(self) -> None:
        for name in self.names:
            if self._is_name(name) and "" in name.strip(".").split("."):
                raise ArgumentError(self.key, "dotted names without an empty segment", repr(name))

    def entry(self, prefix: str) -> str | None:
        """The entry that leaves a layer out, or None; MismatchError for a fused one whose parts differ."""
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
        """Why an entry that was found leaves a layer out."""
        return f"{self.key} has {entry!r:.80}"

    def remedy(self, entry: str) -> str:
        """Remedy for a quantized layer that an entry excludes."""
        return f"take the entry out of {self.key}, or store the layer plain"

    def _is_name(self, entry: str) -> bool:
        """Whether an entry is a dotted name, and not a pattern of them."""
        return True

    def _entry(self, prefix: str) -> str | None:
        if not self.names:
            return None
        place = self._first_name(prefix)
        before = (at for at in self._patterns if place is None or at < place)
        place = next((at for at in before if self._knows(self.names[at], prefix)), place)
        return None if place is None else self.names[place]

    @cached_property
    def _patterns(self) -> tuple[int, ...]:
        """The places of the entries that have to be tried one by one."""
        return tuple(at for at, entry in enumerate(self.names) if not self._is_name(entry))

    @cached_property
    def _dotted(self) -> "_DottedNames":
        return _DottedNames({at: entry for at, entry in enumerate(self.names) if self._is_name(entry)})

    def _first_name(self, prefix: str) -> int | None:
        """The place of the first dotted name that means a layer of this very name."""
        return self._dotted.first(prefix)

    def _knows(self, entry: str, prefix: str) -> bool:
        """Whether a pattern means a layer of this very name; of the base class no entry is one."""
        return False


@dataclass(frozen=True)
class Inside(Exclusions):
    """Of a block, whose name has a number, only these modules are quantized; `others` are left out anyway."""

    key: str = "modules_in_block_to_quantize"
    others: Exclusions = Exclusions()

    def reason(self, entry: str) -> str:
        """Of the list that has an entry, or of the one that names no module of this name."""
        return self.others.reason(entry) if entry in self.others.names else f"{self.key} does not name it"

    def remedy(self, entry: str) -> str:
        """Remedy by the list with the entry, else by the list without a module of this name."""
        named = entry in self.others.names
        return self.others.remedy(entry) if named else f"name the module in {self.key}, or store it plain"

    def entry(self, prefix: str) -> str | None:
        """What leaves a layer out, or None; MismatchError for a fused one whose parts differ."""
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
    """Entries by their segments: a list of thousands costs a layer no more than a list of one."""

    def __init__(self, entries: Mapping[int, str]) -> None:
        self._runs: dict[tuple[str, ...], int] = {}
        for place, entry in entries.items():
            self._runs.setdefault(tuple(entry.strip(".").split(".")), place)
        self._endings: dict[int, dict[tuple[str, ...], int]] = {}  # by their length, once one is looked for
        self._lengths = sorted({len(segments) for segments in self._runs})

    def first(self, prefix: str) -> int | None:
        """The place of the first entry that stands in a name, or that has only more in front."""
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
        """The last segments of the entries that have more of them, and the first place of each."""
        if length not in self._endings:
            ends = self._endings[length] = dict[tuple[str, ...], int]()
            for entry, place in self._runs.items():
                if len(entry) > length:
                    ends.setdefault(entry[-length:], place)
        return self._endings[length]
