"""Orders in memory, as data: one line in einops notation each, and its inverse.

`STORED_MINUS_ONE` is what a stored zero point of GPTQ means unless a checkpoint says gptq_v2.
"""

from qload.layouts.fp4 import NibblePairs
from qload.layouts.packing import ClippedCodes, Order, PackedCodes, Packing
from qload.layouts.zero_points import (
    STORED_MINUS_ONE,
    Stored,
    StoredMinusOne,
    StoredMinusOnePerField,
    StoredMinusOneUnmasked,
    ZeroPoints,
)

__all__ = [
    "STORED_MINUS_ONE",
    "ClippedCodes",
    "NibblePairs",
    "Order",
    "PackedCodes",
    "Packing",
    "Stored",
    "StoredMinusOne",
    "StoredMinusOnePerField",
    "StoredMinusOneUnmasked",
    "ZeroPoints",
]
