"""Orders in memory, as data: one line in einops notation each, and its inverse."""

from qload.layouts.clipped import Clipped
from qload.layouts.order import Order
from qload.layouts.packed import Packed
from qload.layouts.packing import Packing
from qload.layouts.pairs import Pairs
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
    "Clipped",
    "Order",
    "Packed",
    "Packing",
    "Pairs",
    "Stored",
    "StoredMinusOne",
    "StoredMinusOnePerField",
    "StoredMinusOneUnmasked",
    "ZeroPoints",
]
