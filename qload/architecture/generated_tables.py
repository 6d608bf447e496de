"""Tables that `tests/model_tables` fits to the models of one version of transformers.

`model_tables.json` has a table for each type: names and shapes as transformers stores them. This module adds
the spellings of engines: fused projections, and stacked experts.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from qload.architecture.table import Flag, Row, Size, Table

WEIGHT = ".weight"
UNKNOWN = Size(())
# Last parts of names of matrices with one input -> name of the fused matrix in engines.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# Last parts of names of an expert's matrices -> names of the stacks that may store them.
STACKED = {
    "gate_proj": ("gate_up_proj", "gate_proj"),
    "up_proj": ("gate_up_proj", "up_proj"),
    "down_proj": ("down_proj",),
    "w1": ("gate_up_proj", "gate_proj"),
    "w3": ("gate_up_proj", "up_proj"),
    "w2": ("down_proj",),
}
PREDICT = Size(("num_nextn_predict_layers",), 0, 0)
# Sizes of a published config, which lacks keys that transformers derives. `first_dense`: number of the first
# layers without experts, in place of the list `mlp_layer_types`.
PUBLISHED_SIZES = {
    "deepseek_v32": {
        "first_dense": Size(("first_k_dense_replace",), 3),
        "head": Size(("qk_rope_head_dim",)),
    },
    "glm4_moe_lite": {"first_dense": Size((), 1)},
}
DENSE_LAYERS = {
    "mlp_layer_types[i] == dense": "i < first_dense",
    "mlp_layer_types[i] == sparse": "not i < first_dense",
}


@cache
def read_file() -> Mapping[str, Any]:
    """Read the file of tables: `transformers`, its version, and `types`."""
    stored: Mapping[str, Any] = json.loads((Path(__file__).parent / "model_tables.json").read_text())
    return stored


@cache
def generated_table(model_type: str) -> Table | None:
    """Return the table of a type of model; None for a type that is not in the file."""
    stored = read_file()["types"].get(model_type)
    if stored is None:
        return None
    table, sizes = table_of(stored), PUBLISHED_SIZES.get(model_type)
    if sizes is None:
        return table
    predicates = {
        name: f"{text} else {DENSE_LAYERS[text]}" if text in DENSE_LAYERS else text
        for name, text in table.predicates.items()
    }
    return replace(table, sizes={**table.sizes, **sizes}, predicates=predicates)


def table_of(stored: Mapping[str, Any]) -> Table:
    """Return the table of an entry of the file, with the spellings of engines."""
    rows = tuple(map(_row, stored["rows"]))
    sizes = {
        name: Size(tuple(keys), default, null) for name, (keys, default, null) in stored["sizes"].items()
    }
    return Table(
        {**sizes, "unknown": UNKNOWN, "predict": PREDICT},
        (*_with_fused(rows), *_stacks(rows)),
        {name: Flag(**flag) for name, flag in stored.get("flags", {}).items()},
        base=stored.get("base", "model"),
        predicates=stored.get("predicates", {}),
        head=stored.get("head", ""),
        embedding=stored.get("embedding", ""),
        tied=stored.get("tied", False),
        ties=stored.get("ties", True),
        classes=(stored["class"],),
        sections=stored.get("sections", {}),
        text=stored.get("text", ""),
    )


def _row(stored: list[str]) -> Row:
    """Return the row of a line: name, shape, predicate of layers, flags, marks.

    Marks: `optional`, `tensor` for a matrix with inputs first, and `stack` for the matrices of all experts.
    """
    name, shape, where, when, marks = (*stored, "", "", "", "")[:5]
    matrix = "stack" in marks or (name.endswith(WEIGHT) and len(shape.split()) == 2 and "tensor" not in marks)
    return Row(
        name.removesuffix(WEIGHT) if matrix else name, shape, where, when, (), "optional" in marks, not matrix
    )


def _with_fused(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows, and rows of fused matrices."""
    by_name = {row.name: row for row in rows}
    for row in by_name.values():
        lead, _, last = row.name.rpartition(".")
        if "{expert}" in row.name:
            stack = lead.partition(".{expert}")[0]
            within = tuple(f"{stack}.{name}" for name in STACKED.get(last, ()) if not row.tensor)
            yield replace(row, within=within)
            continue
        owner, bias = (lead, ".bias") if row.tensor and last == "bias" else (row.name, "")
        lead, _, last = owner.rpartition(".")
        for fused, parts in FUSED.items():
            members = [by_name[name] for part in parts if (name := f"{lead}.{part}") in by_name]
            if last not in parts or f"{lead}.{fused}" in by_name or len(members) < len(parts):
                continue
            if any(member.tensor for member in members):
                continue
            row = replace(row, within=(f"{lead}.{fused}",))
            if last == parts[0] and not bias:
                yield _fused(f"{lead}.{fused}", members)
        yield row


def _fused(name: str, rows: list[Row]) -> Row:
    """Return the row of a matrix with the outputs of several, and their inputs."""
    (N, K), *others = (row.shape.split() for row in rows)
    if any(inputs != K for _, inputs in others):
        return replace(rows[0], name=name, shape="unknown unknown", optional=True)
    return replace(rows[0], name=name, shape=f"{'+'.join([N, *(n for n, _ in others)])} {K}", optional=True)


def _stacks(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows of stacked experts, for rows of single ones."""
    known = {row.name for row in rows}
    found: dict[str, Row] = {}
    for row in rows:
        lead, _, last = row.name.rpartition(".")
        if "{expert}" not in row.name or row.tensor:
            continue
        stack, (N, K) = lead.partition(".{expert}")[0], row.shape.split()
        for name in STACKED.get(last, ()):
            shape = f"{N}+{N} {K}" if name == "gate_up_proj" else row.shape
            found.setdefault(
                f"{stack}.{name}", replace(row, name=f"{stack}.{name}", shape=shape, optional=True)
            )
    yield from (row for name, row in found.items() if name not in known)
