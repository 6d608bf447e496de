"""The native modules: which of them are here, why one is missing, and what they are asked to use."""

from qload.native.modules import (
    MODULES,
    NativeModule,
    available,
    check,
    check_isa,
    is_on,
    isa,
    load,
    reference,
    requested_threads,
    threads,
    using,
)

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
    "requested_threads",
    "threads",
    "using",
]
