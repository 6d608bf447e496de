"""The native modules: which of them are here, why one is missing, and what they are asked to use."""

from qload.native.modules import MODULES, NativeModule, load
from qload.native.settings import available, check, check_isa, is_on, isa, reference, threads, using

__all__ = [
    "MODULES",
    "NativeModule",
    "available",
    "check",
    "check_isa",
    "is_on",
    "isa",
    "load",
    "reference",
    "threads",
    "using",
]
