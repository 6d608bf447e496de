"""Which way multiplies on a CPU: the fastest in a table that `nox -s bench -- --dispatch` writes.

A row of the table: for weights of a kind and width, activations of a type and an instruction set, up to so
many tokens, the ways from the fastest on. What has more tokens than any row goes the way of the last.

    registers  panels: codes become floats in registers
    cache      panels and rows: some become floats in the cache; few tokens with rows in registers, too
    pairs      EETQ: its pairs of outputs are read as rows
    torch      the weight is dequantized in slices, which torch multiplies
"""

import json
from functools import lru_cache
from importlib import resources

import torch

from qload.errors import ArgumentError
from qload.formats import BNBWeight, CTIntWeight, EETQWeight, Fp8Weight, MXFP8Weight
from qload.kernel_formats.panels import PanelsWeight
from qload.spec import Weight

TABLE = "cpu_dispatch.json"
REGISTERS, CACHE, PAIRS, TORCH = "registers", "cache", "pairs", "torch"
WAYS = {"panels": (CACHE, REGISTERS, TORCH), "rows": (CACHE, TORCH), "eetq": (CACHE, PAIRS, TORCH)}
BYTES: tuple[type[Weight], ...] = (BNBWeight, CTIntWeight, EETQWeight, Fp8Weight, MXFP8Weight)
NARROW, WIDE = 4, 8  # bits of the codes in rows that were measured: the table has no others
Cell = tuple[str, int, str, str]  # kind, bits, type of the activations, instruction set


def kind_of(weight_type: type[Weight]) -> str:
    """What the table calls weights of a type."""
    if issubclass(weight_type, PanelsWeight):
        return "panels"
    return "eetq" if issubclass(weight_type, EETQWeight) else "rows"


def row_bits(weight_type: type[Weight]) -> int:
    """The width that the table has for rows of a type."""
    return WIDE if issubclass(weight_type, BYTES) else NARROW


@lru_cache(maxsize=4096)
def ranked(kind: str, bits: int, dtype: torch.dtype, isa: str, tokens: int) -> tuple[str, ...]:
    """Ways from the fastest on; as they are listed where nothing was measured."""
    rows = _rows(kind, bits, dtype, isa)
    above = [ways for most, ways in rows if tokens <= most]
    return above[0] if above else rows[-1][1] if rows else WAYS[kind]


def most_before_torch(kind: str, bits: int, dtype: torch.dtype, isa: str) -> int | None:
    """Up to how many tokens ways of our own are the fastest; None: any number."""
    before = 0
    for most, ways in _rows(kind, bits, dtype, isa):
        if ways[0] == TORCH:
            return before
        before = most
    return None


def forget() -> None:
    """Read the table again, which has changed."""
    ranked.cache_clear()
    ROWS.clear()
    ROWS.update(_read())


def _rows(kind: str, bits: int, dtype: torch.dtype, isa: str) -> list[tuple[int, tuple[str, ...]]]:
    return ROWS.get((kind, bits, str(dtype).removeprefix("torch."), isa), [])


def _read() -> dict[Cell, list[tuple[int, tuple[str, ...]]]]:
    found: dict[Cell, list[tuple[int, tuple[str, ...]]]] = {}
    try:
        for row in json.loads(resources.files(__package__).joinpath(TABLE).read_text("utf-8")):
            cell = row["kind"], row["bits"], row["dtype"], row["isa"]
            found.setdefault(cell, []).append((row["tokens"], tuple(row["ways"])))
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{__package__}/{TABLE}", "the table as it is installed", repr(error)) from error
    return {cell: sorted(rows) for cell, rows in found.items()}


ROWS = _read()  # once: a model that is compiled cannot open files
