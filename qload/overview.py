"""What qload can do with each format, asked of the rooms themselves: nothing here is a list kept by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import lcm

from qload.detect.claims import READS
from qload.formats import FORMATS
from qload.kernel_formats.repack import restores, targets
from qload.quantize import QUANTIZERS
from qload.spec import Config, Role, TensorSpec, Weight

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
    methods = [name for name, rooms in READS.items() if room in rooms]
    layouts, quantizer = targets(room), QUANTIZERS.get(room.format)
    tensors = ", ".join(spec.suffix for spec in specs if not spec.optional)
    return (
        Cell(True, f"{tensors}; as {_said(room.example)}"),
        Cell(True, "where no method is claimed" if room.plain else ", ".join(methods)),
        Cell(True),
        _cut(room, "N"),
        _cut(room, "K"),
        _fused(room),
        Cell(True, ", ".join(layouts)) if layouts else Cell(False, _why_no_layout(room)),
        Cell(True) if restores(room) else Cell(False, "what is never repacked needs no way back"),
        Cell(True, quantizer.__name__) if quantizer else Cell(False, _why_no_quantizer(room)),
        Cell(True, f"shapes of all, values of {_judged(specs)}"),
    )


def _cut(room: type[Weight], dim: str) -> Cell:
    """Where a layer may be cut, for each config that says otherwise than the one before."""
    found: dict[Cell, Config] = {}
    for config in (room.example, *room.further):
        found.setdefault(_cut_of(room, config, dim), config)
    if len(found) == 1:
        return next(iter(found))
    return Cell(
        True, "; ".join(f"{cell.text} as {_said(config)}" for cell, config in found.items() if cell.yes)
    )


def _cut_of(room: type[Weight], config: Config, dim: str) -> Cell:
    bound = [
        (spec, axis)
        for spec in room.tensors(config)
        for axis in spec.places
        if axis.follows(dim) and axis.free is None
    ]
    never = [spec.name for spec, axis in bound if axis.step(dim, LARGE) == 0]
    if never:
        return Cell(False, f"{never[0]} holds rows in an order of its own")
    step = lcm(*(axis.step(dim, LARGE) for _, axis in bound if not axis.flat))
    flat = lcm(*(axis.granule for _, axis in bound if axis.flat))
    if flat > 1:
        each = "n * K is a multiple" if dim == "N" else "k and K are multiples"
        return Cell(True, f"where {each} of {flat}")
    return Cell(True, f"at multiples of {step}" if step > 1 else "anywhere")


def _fused(room: type[Weight]) -> Cell:
    alike = [spec.name for spec in room.tensors(room.example) if spec.joined() is None and not spec.spent]
    return Cell(True, f"where {' and '.join(alike)} agree" if alike else "")


def _judged(specs: Sequence[TensorSpec]) -> str:
    """The tensors of which not every value can be: what the rules of values look at."""
    return ", ".join(
        spec.suffix
        for spec in specs
        if spec.role is not Role.WORD
        or spec.dtypes[0].is_floating_point
        or spec.nibbles
        or spec.between
        or spec.fact
    )


def _said(config: Config) -> str:
    """A config by what it says that is not the default."""
    own = {field.name: field.default for field in fields(config)}
    said = {name: value for name, default in own.items() if (value := getattr(config, name)) != default}
    return f"{type(config).__name__}({', '.join(f'{name}={value!r}' for name, value in said.items())})"


def _why_no_layout(room: type[Weight]) -> str:
    return "a plain weight has no codes" if room.plain else "there is no kernel format for it"


def _why_no_quantizer(room: type[Weight]) -> str:
    return "there is nothing to quantize" if room.plain else "its codes need calibration data"
