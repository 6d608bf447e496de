"""Quantization while loading: plain layers become typed weights, equal for every number of ranks."""

from qload.quantize.loading import QuantizingLoader, Statistics
from qload.quantize.quantizers import (
    BNB4Quantizer,
    BNBInt8Quantizer,
    EETQQuantizer,
    Fp8Quantizer,
    Quantizer,
    Requantized,
    check_finite,
    requantize,
)

# Quantizers by format.
QUANTIZERS: dict[str, type] = {
    "fp8": Fp8Quantizer,
    "eetq": EETQQuantizer,
    "bnb_nf4": BNB4Quantizer,
    "bnb_fp4": BNB4Quantizer,
    "bnb_int8": BNBInt8Quantizer,
}

__all__ = [
    "QUANTIZERS",
    "BNB4Quantizer",
    "BNBInt8Quantizer",
    "EETQQuantizer",
    "Fp8Quantizer",
    "Quantizer",
    "QuantizingLoader",
    "Requantized",
    "Statistics",
    "check_finite",
    "requantize",
]
