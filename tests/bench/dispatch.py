"""The table that kernels are chosen from, made of measured times."""

import json
from pathlib import Path
from typing import Any

from qload.kernels.cuda import choice

FILE = Path(choice.__file__).with_name(choice.TABLE)


def write(rows: list[dict[str, Any]], capability: tuple[int, int]) -> None:
    """Put these layers' rows in the place of those for the same layout, width and chip."""
    made = merge(json.loads(FILE.read_text("utf-8")), rows, capability)
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in made) + "\n]\n", "utf-8")
    choice.forget()


def merge(
    known: list[dict[str, Any]], rows: list[dict[str, Any]], capability: tuple[int, int]
) -> list[dict[str, Any]]:
    """Rows of the table: kernels of each layer and number of tokens, from the fastest on.

    Neighbouring numbers of tokens with the same order of kernels are one row, up to the larger.
    """
    replaced = {(row["layout"], row["bits"]) for row in rows}
    made = [
        row
        for row in known
        if tuple(row["capability"]) != capability or (row["layout"], row["bits"]) not in replaced
    ]
    layers = dict.fromkeys((row["layout"], row["bits"], row["K"] * row["N"]) for row in rows)
    for layout, bits, size in sorted(layers):
        points = sorted(
            (row["M"], _order(row["kernels"]))
            for row in rows
            if (row["layout"], row["bits"], row["K"] * row["N"]) == (layout, bits, size)
        )
        for i, (M, kernels) in enumerate(points):
            if i + 1 < len(points) and points[i + 1][1] == kernels:
                continue
            line = {"layout": layout, "bits": bits, "capability": list(capability)}
            made.append(line | {"bytes": size * bits // 8, "tokens": M, "kernels": kernels})
    return made


def _order(times: dict[str, float | None]) -> list[str]:
    return [name for _, name in sorted((time, name) for name, time in times.items() if time is not None)]
