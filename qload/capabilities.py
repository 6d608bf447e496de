"""What qload can do with each format, derived from the formats themselves: no list is kept by hand."""

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
class Capability:
    """Yes or no, and how or why."""

    yes: bool
    text: str = ""

    def __str__(self) -> str:
        return f"{'yes' if self.yes else 'no'}{': ' * bool(self.text)}{self.text}"


def overview() -> Mapping[str, Mapping[str, Capability]]:
    """format -> column -> Capability, for every format that is read, with its example config."""
    return {weight_type.format: dict(zip(COLUMNS, _row(weight_type), strict=True)) for weight_type in FORMATS}


def as_markdown() -> str:
    """The page of docs: a section a format, a line a column."""
    parts = ["# Formats", "What can be done with each format, as `qload formats` prints it."]
    for name, row in overview().items():
        lines = (f"| {column} | {cell} |" for column, cell in row.items())
        parts.append("\n".join([f"## {name}", "", "| | |", "|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def _row(weight_type: type[Weight]) -> tuple[Capability, ...]:
    specs = weight_type.tensors(weight_type.example)
    methods = [name for name, weight_types in READS.items() if weight_type in weight_types]
    layouts, quantizer = targets(weight_type), QUANTIZERS.get(weight_type.format)
    tensors = ", ".join(spec.suffix for spec in specs if not spec.optional)
    return (
        Capability(True, f"{tensors}; as {_said(weight_type.example)}"),
        Capability(True, "where no method is claimed" if weight_type.plain else ", ".join(methods)),
        Capability(True),
        _cut(weight_type, "N"),
        _cut(weight_type, "K"),
        _fused(weight_type),
        Capability(True, ", ".join(layouts)) if layouts else Capability(False, _why_no_layout(weight_type)),
        Capability(True)
        if restores(weight_type)
        else Capability(False, "what is never repacked needs no way back"),
        Capability(True, quantizer.__name__)
        if quantizer
        else Capability(False, _why_no_quantizer(weight_type)),
        Capability(True, f"shapes of all, values of {_judged(specs)}"),
    )


def _cut(weight_type: type[Weight], dim: str) -> Capability:
    """Where a layer may be cut, for each config that says otherwise than the one before."""
    found: dict[Capability, Config] = {}
    for config in (weight_type.example, *weight_type.further):
        found.setdefault(_cut_of(weight_type, config, dim), config)
    if len(found) == 1:
        return next(iter(found))
    return Capability(
        True, "; ".join(f"{cell.text} as {_said(config)}" for cell, config in found.items() if cell.yes)
    )


def _cut_of(weight_type: type[Weight], config: Config, dim: str) -> Capability:
    bound = [
        (spec, axis)
        for spec in weight_type.tensors(config)
        for axis in spec.places
        if axis.follows(dim) and axis.free is None
    ]
    never = [spec.name for spec, axis in bound if axis.step(dim, LARGE) == 0]
    if never:
        return Capability(False, f"{never[0]} holds rows in an order of its own")
    step = lcm(*(axis.step(dim, LARGE) for _, axis in bound if not axis.flat))
    flat = lcm(*(axis.granule for _, axis in bound if axis.flat))
    if flat > 1:
        each = "n * K is a multiple" if dim == "N" else "k and K are multiples"
        return Capability(True, f"where {each} of {flat}")
    return Capability(True, f"at multiples of {step}" if step > 1 else "anywhere")


def _fused(weight_type: type[Weight]) -> Capability:
    alike = [
        spec.name
        for spec in weight_type.tensors(weight_type.example)
        if spec.joined() is None and not spec.spent
    ]
    return Capability(True, f"where {' and '.join(alike)} agree" if alike else "")


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


def _why_no_layout(weight_type: type[Weight]) -> str:
    return "a plain weight has no codes" if weight_type.plain else "there is no kernel format for it"


def _why_no_quantizer(weight_type: type[Weight]) -> str:
    return "there is nothing to quantize" if weight_type.plain else "its codes need calibration data"
