"""Orders in memory, as data: one line in einops notation each, and its inverse.

`STORED_MINUS_ONE` is what a stored zero point of GPTQ means unless a checkpoint says gptq_v2.
"""

from qload.layouts.clipped_codes import ClippedCodes
from qload.layouts.nibble_pairs import NibblePairs
from qload.layouts.order import Order
from qload.layouts.packed_codes import PackedCodes
from qload.layouts.packing import Packing
from qload.layouts.zeros import (
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
