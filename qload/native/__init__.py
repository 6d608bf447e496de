"""Native code: the same bits as the torch code, at the speed of memory. Whatever is missing, torch does."""

from qload.native.cpu import PACKED, AxisDigit, Digit, FieldMove, fits
from qload.native.held import LazyCodes, Meaning, block, plain, shares_memory, stood_for, values
from qload.native.modules import MODULES, NativeModule, load
from qload.native.pages import in_large_pages
from qload.native.routines import (
    dequantize,
    dequantize_numbers,
    dequantize_rows,
    fields,
    gather,
    has_routines,
    move,
    pack,
    unpack,
)
from qload.native.settings import available, isa, reference, threads, using

__all__ = [
    "MODULES",
    "PACKED",
    "AxisDigit",
    "Digit",
    "FieldMove",
    "LazyCodes",
    "Meaning",
    "NativeModule",
    "available",
    "block",
    "dequantize",
    "dequantize_numbers",
    "dequantize_rows",
    "fields",
    "fits",
    "gather",
    "has_routines",
    "in_large_pages",
    "isa",
    "load",
    "move",
    "pack",
    "plain",
    "reference",
    "shares_memory",
    "stood_for",
    "threads",
    "unpack",
    "using",
    "values",
]
