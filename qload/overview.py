"""What qload can do with each format, asked of the rooms themselves: nothing here is a list kept by hand."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from types import ModuleType

from qload.detect.claims import METHODS
from qload.formats import FORMATS
from qload.kernels.repack import restores, targets
from qload.quantize import QUANTIZERS
from qload.spec import Weight
from qload.verify.rules import RULES

COLUMNS = (
    "load",
    "detect",
    "dequantize",
    "shard column",
    "shard row",
    "fused",
    "repack to",
    "undo",
    "quantize while loading",
    "verify",
)
METHODS_HOME = "qload.detect.methods"
LARGE = {"N": 1 << 14, "K": 1 << 14}  # sizes that every packing divides


@dataclass(frozen=True)
class Cell:
    """Yes or no, and how or why."""

    yes: bool
    text: str = ""

    def __str__(self) -> str:
        return f"{'yes' if self.yes else 'no'}{': ' * bool(self.text)}{self.text}"


def overview() -> Mapping[str, Mapping[str, Cell]]:
    """format -> column -> Cell, for every format that is read, with the config it names as its example."""
    return {room.format: dict(zip(COLUMNS, _row(room), strict=True)) for room in FORMATS}


def markdown() -> str:
    """The page of docs: a section a format, a line a column."""
    parts = ["# Formats", "What can be done with each format, as `qload formats` prints it."]
    for name, row in overview().items():
        lines = (f"| {column} | {cell} |" for column, cell in row.items())
        parts.append("\n".join([f"## {name}", "", "| | |", "|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def _row(room: type[Weight]) -> tuple[Cell, ...]:
    specs = room.tensors(room.example)
    methods = [name for name, read in METHODS.items() if room in _rooms(sys.modules[read.__module__])]
    layouts, quantizer = targets(room), QUANTIZERS.get(room.format)
    tensors = ", ".join(spec.suffix for spec in specs if not spec.optional)
    return (
        Cell(True, f"{tensors}; as {room.example}"),
        Cell(True, "where no method is claimed" if room.plain else ", ".join(methods)),
        Cell(True),
        _cut(room, "N"),
        _cut(room, "K"),
        _fused(room),
        Cell(True, ", ".join(layouts)) if layouts else Cell(False, _why_no_layout(room)),
        Cell(True) if restores(room) else Cell(False, "what is never repacked needs no way back"),
        Cell(True, quantizer.__name__) if quantizer else Cell(False, _why_no_quantizer(room)),
        Cell(True, f"{len(RULES)} rules, --against, --tp"),
    )


def _rooms(module: ModuleType) -> Iterator[object]:
    """The formats that the reader of a method names, or the readers it asks."""
    for value in vars(module).values():
        if isinstance(value, ModuleType) and value.__name__.startswith(f"{METHODS_HOME}."):
            yield from _rooms(value)
        else:
            yield value


def _cut(room: type[Weight], dim: str) -> Cell:
    specs = room.tensors(room.example)
    bound = [(spec, axis) for spec in specs for axis in spec.axes if axis.follows(dim) and axis.free is None]
    if not bound:
        return Cell(False, f"no tensor has an axis {dim}")
    never = [spec.name for spec, axis in bound if axis.step(dim, LARGE) == 0]
    if never:
        return Cell(False, f"{never[0]} holds rows in an order of its own")
    step = lcm(*(axis.step(dim, LARGE) for _, axis in bound))
    return Cell(True, f"at multiples of {step}" if step > 1 else "anywhere")


def _fused(room: type[Weight]) -> Cell:
    alike = [spec.name for spec in room.tensors(room.example) if spec.joined() is None and not spec.spent]
    return Cell(True, f"where {' and '.join(alike)} agree" if alike else "")


def _why_no_layout(room: type[Weight]) -> str:
    return "a plain weight has no codes" if room.plain else "there is no kernel format for it"


def _why_no_quantizer(room: type[Weight]) -> str:
    return "there is nothing to quantize" if room.plain else "its codes need calibration data"
