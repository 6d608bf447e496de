"""The table that kernels are chosen from, made of measured times."""

import json
from pathlib import Path
from typing import Any

from qload.kernels.cuda import dispatch

FILE = Path(dispatch.__file__).with_name(dispatch.TABLE)


def write(rows: list[dict[str, Any]], capability: tuple[int, int]) -> None:
    """Put these layers' rows in the place of those for the same layout, width and chip."""
    made = merge(json.loads(FILE.read_text("utf-8")), rows, capability)
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in made) + "\n]\n", "utf-8")
    dispatch.forget()


def merge(
    known: list[dict[str, Any]], rows: list[dict[str, Any]], capability: tuple[int, int]
) -> list[dict[str, Any]]:
    """Rows of the table: kernels of each layer and number of tokens, from the fastest on.

    Neighbouring numbers of tokens with the same order of kernels are one row, up to the larger. What was not
    measured stays: layers of other sizes and kinds, more tokens.
    """
    measured: dict[tuple[str, str, int, int], dict[int, list[dict[str, float | None]]]] = {}
    for row in rows:
        layer = row["layout"], row["kind"], row["bits"], row["K"] * row["N"] * row["bits"] // 8
        measured.setdefault(layer, {}).setdefault(row["M"], []).append(row["kernels"])

    def stays(row: dict[str, Any]) -> bool:
        of_layer = measured.get((row["layout"], row.get("kind", ""), row["bits"], row["bytes"]), {})
        return tuple(row["capability"]) != capability or row["tokens"] > max(of_layer, default=0)

    made = [row for row in known if stays(row)]
    for (layout, kind, bits, size), points in sorted(measured.items()):
        order = [(M, _order(times)) for M, times in sorted(points.items())]
        for i, (M, kernels) in enumerate(order):
            if i + 1 < len(order) and order[i + 1][1] == kernels:
                continue
            of_kind = {"kind": kind} if kind else {}
            line = {"layout": layout, **of_kind, "bits": bits, "capability": list(capability)}
            made.append(line | {"bytes": size, "tokens": M, "kernels": kernels})
    return made


def _order(layers: list[dict[str, float | None]]) -> list[str]:
    """Kernels by their time on all layers of one size, of those that were right on each."""
    right = [name for name in layers[0] if all(times.get(name) is not None for times in layers)]
    return sorted(right, key=lambda name: sum(times[name] or 0 for times in layers))
