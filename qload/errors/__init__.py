"""Every error qload raises on purpose."""

from qload.errors.asked import (
    ArgumentError,
    CastError,
    CutError,
    DivideError,
    KernelRefusedError,
    NoKernelError,
    NotWarmError,
    PatternError,
    RepackError,
    worlds,
)
from qload.errors.base import QloadError
from qload.errors.stored import (
    AmbiguousIndexError,
    ConfigError,
    DtypeError,
    IndexValueError,
    MismatchError,
    MissingTensorError,
    ShapeError,
    StorageError,
    TwoFormatsError,
    UnsupportedFormatError,
)

__all__ = [
    "AmbiguousIndexError",
    "ArgumentError",
    "CastError",
    "ConfigError",
    "CutError",
    "DivideError",
    "DtypeError",
    "IndexValueError",
    "KernelRefusedError",
    "MismatchError",
    "MissingTensorError",
    "NoKernelError",
    "NotWarmError",
    "PatternError",
    "QloadError",
    "RepackError",
    "ShapeError",
    "StorageError",
    "TwoFormatsError",
    "UnsupportedFormatError",
    "worlds",
]
