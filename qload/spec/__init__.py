"""Interface of checkpoint formats: axis text, tensor declarations, configs, typed weights."""

from qload.devices import run_of
from qload.spec.activations import ActivationScheme
from qload.spec.axis import LOGICAL, PARTS, Axis
from qload.spec.casts import check_out, rounded
from qload.spec.output_slices import can_cut, outputs, ranges
from qload.spec.tensor import (
    Fact,
    Names,
    Role,
    ScaleBytes,
    Shape,
    TensorSpec,
    check_dtypes,
    is_appended,
    named,
    solve,
)
from qload.spec.weight import (
    Codes,
    Config,
    FieldNames,
    Grouped,
    Layer,
    LayerClaims,
    LayerHeaders,
    LayerValues,
    ShareBounds,
    Weight,
    expand_parts,
    symmetric,
)

__all__ = [
    "LOGICAL",
    "PARTS",
    "ActivationScheme",
    "Axis",
    "Codes",
    "Config",
    "Fact",
    "FieldNames",
    "Grouped",
    "Layer",
    "LayerClaims",
    "LayerHeaders",
    "LayerValues",
    "Names",
    "Role",
    "ScaleBytes",
    "Shape",
    "ShareBounds",
    "TensorSpec",
    "Weight",
    "can_cut",
    "check_dtypes",
    "check_out",
    "expand_parts",
    "is_appended",
    "named",
    "outputs",
    "ranges",
    "rounded",
    "run_of",
    "solve",
    "symmetric",
]
