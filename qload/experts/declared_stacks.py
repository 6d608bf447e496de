"""Stacks by declaration, of formats without a layout in `stack_layouts`: experts are the first axis.

    one layer, as declared      N K/2        N K/32
    stack of E experts          (E, N, K/2)  (E, N, K/32)

The first tensor of a declaration holds the codes, and its name and number of axes identify a stack. Each of
the format's tensors is stored as `PREFIX.field` or `PREFIX_field`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from qload import dtypes, formats
from qload.dtypes import Dtype
from qload.experts.stack_layouts import FIELDS, LAYERS, WEIGHTS
from qload.formats.fp8 import WEIGHTS as FP8
from qload.formats.unquantized import FLOATS
from qload.spec import Weight
from qload.storage import WeightStorage

WEIGHT_DTYPES = {  # field of a weight -> its dtypes
    "weight": (*FLOATS, *FP8, dtypes.uint8, dtypes.int8),
    "weight_packed": (dtypes.uint8, dtypes.int32),
    "qweight": (dtypes.int32,),
}
MATRIX_AXES = 2  # codes with more axes do not show the order of outputs and inputs
Place = tuple[str, str]  # the module of the experts, and the name of a matrix in it


@dataclass(frozen=True)
class CodesField:
    """The field of codes in declarations: its axes and dtypes, and the fields beside it in a layer."""

    axes: frozenset[int]
    dtypes: frozenset[Dtype]
    fields: tuple[str, ...]

    def endings(self) -> dict[str, str]:
        """Suffix of a stack's name -> the field of an expert's own layer."""
        return {f"{mark}{field}": field for field in self.fields for mark in "_."}


def codes_fields() -> Mapping[str, CodesField]:
    """Fields of codes in the declarations of all formats, except for those of `stack_layouts`."""
    return _codes_fields(formats.FORMATS)


def stack_endings() -> dict[str, str]:
    """Suffix of a stack's name -> the field of an expert's own layer, for all formats."""
    declared = (codes.endings() for codes in codes_fields().values())
    return {ending: field for endings in declared for ending, field in endings.items()} | FIELDS


def stack_names(prefix: str) -> list[str]:
    """Possible names of a stacked matrix's weight."""
    return [f"{prefix}{ending}" for ending, field in stack_endings().items() if is_weight(field)]


def is_weight(field: str) -> bool:
    """Return whether a field of a layer is its weight or its codes."""
    return field in WEIGHTS or field in codes_fields()


def stored_codes(storage: WeightStorage, stored: Iterable[str]) -> dict[Place, str]:
    """Find stacks of codes by `stored` name, dtype and axes; return their fields by places of matrices."""
    found: dict[Place, str] = {}
    known, joined = _codes_fields(formats.FORMATS), _joined_names(formats.FORMATS)
    for name in stored:
        lead, _, last = name.rpartition(".")
        if last in joined:
            module, (matrix, field) = lead, joined[last]
        elif last in known:
            (module, _, matrix), field = lead.rpartition("."), last
        else:
            continue
        is_named = matrix in LAYERS or module.endswith(("experts", "moe"))
        if not module or module[-1].isdigit() or not is_named:
            continue
        codes, info = known[field], storage.info(name)
        if len(info.shape) - 1 in codes.axes and info.stored_dtype in codes.dtypes:
            found[module, matrix] = field
    return found


@cache
def _codes_fields(types: tuple[type[Weight], ...]) -> dict[str, CodesField]:
    known = {*FIELDS.values()}
    found: dict[str, CodesField] = {}
    for weight_type in types:
        for config in (weight_type.example, *weight_type.further):
            specs = weight_type.tensors(config)
            axes = specs[0].axes
            if any(axis.dim == "E" for axis in axes) or len(axes) > MATRIX_AXES:  # stacks; tiles and vectors
                continue
            suffixes = [suffix for spec in specs for suffix in spec.suffixes]
            fields = [suffix for suffix in suffixes if suffix[0] != "_" and "." not in suffix]
            for field in {*specs[0].suffixes} & {*fields}:
                if field in known and not {*specs[0].dtypes}.isdisjoint(
                    WEIGHT_DTYPES.get(field, specs[0].dtypes)
                ):
                    continue
                other = found.get(field, CodesField(frozenset(), frozenset(), ()))
                found[field] = CodesField(
                    other.axes | {len(axes)},
                    other.dtypes | {*specs[0].dtypes},
                    tuple(dict.fromkeys((*other.fields, *fields, "bias"))),
                )
    return found


@cache
def _joined_names(types: tuple[type[Weight], ...]) -> dict[str, Place]:
    """`down_proj_nibbles` -> `down_proj`, `nibbles`."""
    return {f"{matrix}_{field}": (matrix, field) for matrix in LAYERS for field in _codes_fields(types)}
