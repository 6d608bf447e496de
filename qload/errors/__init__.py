"""Every error qload raises on purpose."""

from qload.errors.asked import (
    ArgumentError,
    CastError,
    CutError,
    DivideError,
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
    "MismatchError",
    "MissingTensorError",
    "PatternError",
    "QloadError",
    "RepackError",
    "ShapeError",
    "StorageError",
    "TwoFormatsError",
    "UnsupportedFormatError",
    "worlds",
]
