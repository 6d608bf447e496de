"""Native modules of this installation, and the settings for native code."""

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
