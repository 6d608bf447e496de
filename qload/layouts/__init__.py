"""Orders in memory as data: one line of einops notation and its inverse.

`STORED_MINUS_ONE` is the convention of GPTQ zero points, unless the checkpoint is gptq_v2.
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
