"""Page docs/types.md, from the outcomes of `python -m tests.model_damage --write`."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.paths import ROOT

PAGE, OUTCOMES = ROOT / "docs" / "types.md", Path(__file__).parent / "outcomes.json"
TITLES = {"plain": "plain", "gptq": "GPTQ", "w4a16": "W4A16", "fp8 block": "FP8", "nvfp4": "NVFP4"}
HEAD = """\
# Types of model

`python -m tests.model_damage --write` wrote this page: it builds a tiny random model of each type with a
table, by transformers {version}, writes it in five formats, and tries each (*yes*):

- `verify` explains every byte, compares shapes and finds nothing, in at most {seconds} s of CPU;
- transformers with qload's layers has the logits of the dequantized model, within 1e-5 of their range;
- `qload run` generates the tokens of transformers with the dequantized weights; not tried for FP8, whose
  inputs are quantized.

GPTQ is converted from W4A16 of compressed-tensors, FP8 has blocks, NVFP4 is of experts with names of their
own. Empty: no such layers. *alone*: planted kinds of damage that `verify` finds. *against*: kinds that only
`--against` a sound copy shows."""


def read_outcomes() -> dict[str, Any]:
    """Read the outcomes."""
    stored: dict[str, Any] = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {"types": {}}
    return stored


def page(stored: Mapping[str, Any]) -> str:
    """Return the Markdown page."""
    notes: dict[str, int] = {}
    rows: dict[tuple[str, ...], list[str]] = {}  # types with equal results share a row
    left_out: dict[str, str] = {}
    kinds: dict[str, dict[str, list[str]]] = {"alone": {}, "against": {}, "silent": {}}
    for kind, outcome in stored["types"].items():
        if "error" in outcome:
            left_out[kind] = outcome["error"]
            continue
        cells = []
        for name in TITLES:
            error = outcome["formats"].get(name)
            cells.append(
                "" if error is None else str(notes.setdefault(error, len(notes) + 1)) if error else "yes"
            )
        accused = any(error.startswith("verify") for error in outcome["formats"].values())
        for place, found in kinds.items() if not accused else ():
            for name in outcome[place]:
                found.setdefault(name, []).append(kind)
        numbers = ("" if accused else str(len(outcome[place])) for place in ("alone", "against"))
        rows.setdefault((*cells, *numbers), []).append(f"`{kind}`")
    seconds = max((outcome.get("seconds", 0) for outcome in stored["types"].values()), default=0)
    parts = [HEAD.format(version=stored["transformers"], seconds=seconds)]
    lines = [("<br>".join(types), *cells) for cells, types in rows.items()]
    parts.append(_table(("type", *TITLES.values(), "alone", "against"), lines))
    if notes:
        parts.append(_table(("", "error"), ((str(number), error) for error, number in notes.items())))
    parts.append("Kinds that only `--against` shows, by types: " + _counts(kinds["against"]))
    parts.append("Kinds that nothing shows: " + (_counts(kinds["silent"]) if kinds["silent"] else "none."))
    uncompared = {
        kind: each["uncompared"] for kind, each in stored["types"].items() if each.get("uncompared")
    }
    if uncompared:
        counts = ", ".join(f"`{kind}`:{count}" for kind, count in uncompared.items())
        parts.append(f"Tensors whose shape is not compared: {counts}.")
    if left_out:
        parts.append("Left out:")
        parts.append(_table(("type", "error"), ((f"`{kind}`", error) for kind, error in left_out.items())))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _counts(kinds: Mapping[str, list[str]]) -> str:
    ordered = sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0]))
    return ", ".join(f"`{name}`:{len(types)}" for name, types in ordered) + "."


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"|{'|'.join(row)}|\n" for row in (heads, ("---",) * len(heads), *rows))
