"""Which layers a quantization leaves out, by names: whole ones, never a part of one.

An entry excludes the layers in whose dotted name it stands as a run of whole segments: `layers.1` excludes
`model.layers.1.mlp.up_proj` and not `model.layers.10.mlp.up_proj`. An entry that only has more in front,
as `language_model.model.layers.1` beside `model.layers.1`, means the same layer. A dot at an end of an
entry is what other readers need to tell `mlp.gate.` from `mlp.gate_proj`, and says nothing here. A layer
that is fused out of several of the checkpoint's is excluded if all of these are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qload.errors import ArgumentError, MismatchError

# What engines make of one layer and checkpoints of several, by the last segment of the name.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True)
class Exclusions:
    """The names that a config leaves out, and the key that lists them."""

    names: tuple[str, ...] = ()
    key: str = "modules_to_not_convert"
    fused: tuple[tuple[str, tuple[str, ...]], ...] = tuple(FUSED.items())

    def __post_init__(self) -> None:
        for name in self.names:
            if "" in name.strip(".").split("."):
                raise ArgumentError(self.key, "dotted names without an empty segment", repr(name))

    def entry(self, prefix: str) -> str | None:
        """The entry that leaves a layer out, or None; MismatchError for a fused one whose parts differ."""
        found = self._entry(prefix)
        if found is not None:
            return found
        parent, _, own = prefix.rpartition(".")
        parts = [f"{parent}.{part}" if parent else part for part in dict(self.fused).get(own, ())]
        entries = {part: entry for part in parts if (entry := self._entry(part)) is not None}
        if entries and len(entries) < len(parts):
            kept = next(part for part in parts if part not in entries)
            raise MismatchError(
                prefix,
                "fused of layers that are not all quantized or all left out",
                f"{' and '.join(parts)} alike in {self.key}",
                f"{next(iter(entries))} left out, {kept} not",
            )
        return next(iter(entries.values()), None)

    def _entry(self, prefix: str) -> str | None:
        segments = prefix.split(".")
        return next((entry for entry in self.names if _means(entry.strip(".").split("."), segments)), None)


def _means(entry: Sequence[str], segments: Sequence[str]) -> bool:
    if len(entry) > len(segments):
        return list(entry[-len(segments) :]) == list(segments)
    starts = range(len(segments) - len(entry) + 1)
    return any(list(segments[start : start + len(entry)]) == list(entry) for start in starts)
