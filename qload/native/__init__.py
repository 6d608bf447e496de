"""Native code: the same bits as the torch code, at the speed of memory. Whatever is missing, torch does."""

from qload.native.asked import available, isa, reference, threads, using
from qload.native.built import MODULES, Module, load
from qload.native.cpu import PACKED, Digit, Field, Place, fields, move, pack, unpack

__all__ = [
    "MODULES",
    "PACKED",
    "Digit",
    "Field",
    "Module",
    "Place",
    "available",
    "fields",
    "isa",
    "load",
    "move",
    "pack",
    "reference",
    "threads",
    "unpack",
    "using",
]
