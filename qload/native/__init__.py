"""Native code: the same bits as the torch code, at the speed of memory. Whatever is missing, torch does."""

from qload.native.asked import available, isa, reference, threads, using
from qload.native.built import MODULES, Module, load
from qload.native.cpu import PACKED, Digit, Field, Place, fits
from qload.native.held import Held, Meaning, block, plain, shares_memory, stood_for, values
from qload.native.pages import in_large_pages
from qload.native.routines import (
    dequantize,
    dequantize_numbers,
    dequantize_rows,
    fields,
    gather,
    move,
    pack,
    takes,
    unpack,
)

__all__ = [
    "MODULES",
    "PACKED",
    "Digit",
    "Field",
    "Held",
    "Meaning",
    "Module",
    "Place",
    "available",
    "block",
    "dequantize",
    "dequantize_numbers",
    "dequantize_rows",
    "fields",
    "fits",
    "gather",
    "in_large_pages",
    "isa",
    "load",
    "move",
    "pack",
    "plain",
    "reference",
    "shares_memory",
    "stood_for",
    "takes",
    "threads",
    "unpack",
    "using",
    "values",
]
