"""Which layers a quantization leaves out, by names: whole ones, never a part of one.

An entry excludes the layers in whose dotted name it stands as a run of whole segments: `layers.1` excludes
`model.layers.1.mlp.up_proj` and not `model.layers.10.mlp.up_proj`. A layer that an engine fuses out of
several of the checkpoint's is excluded if all of these are.
"""

from collections.abc import Mapping, Sequence

from qload.errors import MismatchError

# What engines make of one layer and checkpoints of several, by the last segment of the name.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def is_excluded(prefix: str, entries: Sequence[str], fused: Mapping[str, Sequence[str]] = FUSED) -> bool:
    """Whether a layer is left out; MismatchError for a fused one whose parts differ in it."""
    if _named(prefix, entries):
        return True
    parent, _, own = prefix.rpartition(".")
    parts = [f"{parent}.{part}" if parent else part for part in fused.get(own, ())]
    out = [part for part in parts if _named(part, entries)]
    if out and len(out) < len(parts):
        kept = next(part for part in parts if part not in out)
        raise MismatchError(
            prefix,
            "fused of layers that are not all quantized or all left out",
            f"{' and '.join(parts)} alike in modules_to_not_convert",
            f"{out[0]} left out, {kept} not",
        )
    return bool(out)


def _named(prefix: str, entries: Sequence[str]) -> bool:
    segments = prefix.split(".")
    return any(_within(entry.split("."), segments) for entry in entries)


def _within(run: list[str], segments: list[str]) -> bool:
    starts = range(len(segments) - len(run) + 1)
    return any(segments[start : start + len(run)] == run for start in starts)
