"""Names of tensors against the patterns of a table: looked up, and never enumerated."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from qload.architecture.adapters import WRAPPER, base_name
from qload.architecture.table import Row, Table

SPELLINGS = re.compile(r"\{([^{}]*\|[^{}]*)\}")
DIGITS = 18  # of a number in a name; a longer one is no number of a layer
# What the names of a text model begin with inside of models that see or hear too.
LEADS = ("", "model.language_model.", "model.text_model.", "language_model.", "thinker.", "language.", "llm.")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a name stands in a table: its row, its layer and expert.

    `lead`: what comes before the decoder's own name. `bare`: the base of that name is left out.
    """

    row: Row
    key: str
    layer: int | None
    expert: int | None
    lead: str
    bare: bool


def spellings(name: str) -> tuple[str, ...]:
    """`{w1|gate_proj}.weight` -> `w1.weight` and `gate_proj.weight`."""
    pieces = SPELLINGS.split(name)
    choices = [piece.split("|") if at % 2 else [piece] for at, piece in enumerate(pieces)]
    return tuple(map("".join, product(*choices)))


def keys(name: str) -> tuple[str, ...]:
    """What the names that a pattern stands for are looked up by: all numbers are `{}`."""
    return tuple(spelled.replace("{layer}", "{}").replace("{expert}", "{}") for spelled in spellings(name))


def spelled(name: str, layer: int | None = None, expert: int | None = None) -> str:
    """A pattern as transformers writes it, with its numbers."""
    return spellings(name)[0].replace("{layer}", str(layer)).replace("{expert}", str(expert))


def rows_by_key(table: Table) -> Mapping[str, Row]:
    """Every spelling of every row."""
    return {key: row for row in table.rows for key in keys(row.name)}


def find(name: str, rows: Mapping[str, Row], base: str) -> Place | None:
    """The row that a name belongs to, under any of the leads, with the decoder's own base or without it.

    PEFT's segments of a name are ignored.
    """
    wrapper, name = WRAPPER * name.startswith(WRAPPER), base_name(name)
    for lead in LEADS:
        if not name.startswith(lead):
            continue
        key, numbers = _numbered(name[len(lead) :])
        for tried, bare in ((key, False), (f"{base}.{key}", True)):
            row = rows.get(tried)
            if row is not None:
                layer, expert, *_ = (*numbers, None, None)
                return Place(row, tried, layer, expert, wrapper + lead, bare)
    return None


def tails(name: str) -> Iterator[str]:
    """`a.b.c` -> `a.b.c`, `b.c`, `c`."""
    while name:
        yield name
        name = name.partition(".")[2]


def _numbered(name: str) -> tuple[str, list[int]]:
    parts, numbers = name.split("."), []
    for at, part in enumerate(parts):
        if len(part) <= DIGITS and part.isascii() and part.isdecimal() and str(int(part)) == part:
            numbers.append(int(part))
            parts[at] = "{}"
    return ".".join(parts), numbers
