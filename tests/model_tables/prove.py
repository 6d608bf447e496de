"""Proof of an entry: further samples, read by the library itself."""

from collections.abc import Mapping
from typing import Any

from qload.architecture.architecture import (
    Architecture,
    Inventory,
    join_towers,
    read_sizes,
    read_text_architecture,
)
from qload.architecture.generated_tables import table_of
from qload.architecture.table import row_keys
from tests.model_tables.build import Sample

WEIGHT = ".weight"


def architecture_of_entry(entry: Mapping[str, Any], config: Mapping[str, Any]) -> Architecture:
    """Return the architecture by an entry that is in no file."""
    table = table_of(entry)
    if table.text:
        text = read_text_architecture(config)
        assert text is not None
        return join_towers(text, table, config)
    sizes, notes = read_sizes(table, config)
    tie = config.get("tie_word_embeddings", table.tied)
    return Architecture("", table, config, sizes, bool(tie), True, notes)


def differences(entry: Mapping[str, Any], sample: Sample) -> dict[str, str]:
    """Return rows of an entry that a sample contradicts, by lookup key: `name`, `shape`, `missing`."""
    architecture = architecture_of_entry(entry, sample.config)
    found: dict[str, str] = {}
    names: set[str] = set()
    for name, shape in sample.shapes.items():
        prefix = name.removesuffix(WEIGHT)
        names |= {name, prefix}
        place = architecture.find(name) or architecture.find(prefix)
        if place is None:
            found[name] = "name"
            continue
        if place.row.tensor:
            expected: tuple[int, ...] | None = architecture.shape(name)
        else:
            expected = architecture.expected(prefix)
            experts = architecture.sizes.get("experts")
            if expected is not None and len(shape) == 3 and experts is not None:
                inputs_first = architecture.table.stacked.inputs_first
                expected = (experts, *(expected[::-1] if inputs_first else expected))
        if expected is not None and expected != shape:
            found[place.key] = "shape"
    for missing in Inventory(architecture, names).missing():
        place = architecture.find(missing.name)
        keys = [place.key] if place else _keys_under(architecture, missing.name)
        found |= dict.fromkeys(keys, "missing")
    return found


def _keys_under(architecture: Architecture, prefix: str) -> list[str]:
    """Lookup keys of the rows of experts."""
    return [key for row in architecture.table.rows if "{expert}" in row.name for key in row_keys(row.name)]


def prune(entry: dict[str, Any], contradicted: Mapping[str, str]) -> None:
    """Make the shape of a contradicted row unknown, or its tensor optional."""
    for line in entry["rows"]:
        keys = {*row_keys(line[0]), *row_keys(line[0].removesuffix(WEIGHT))}
        kinds = {contradicted[key] for key in keys if key in contradicted}
        if not kinds:
            continue
        line += [""] * (5 - len(line))
        if "shape" in kinds:
            line[1] = " ".join(["unknown"] * len(line[1].split()))
        if "missing" in kinds and "optional" not in line[4]:
            line[4] = f"{line[4]} optional".strip()
