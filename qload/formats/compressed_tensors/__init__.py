"""compressed-tensors: codes in words along K (pack-quantized), or a byte each (int-quantized).

    packed         pack-quantized, one scale for each group of inputs
    packed_tensor  pack-quantized, one scale for the tensor
    integers       int-quantized

Source: compressed-tensors 0.14.0 and 0.20.0, bit-equal to both after one rounding to the dtype of the scales.
"""

from __future__ import annotations

from dataclasses import replace

from qload.formats.compressed_tensors.integers import CTIntConfig, CTIntWeight
from qload.formats.compressed_tensors.packed import CTPackConfig, CTPackWeight
from qload.formats.compressed_tensors.packed_tensor import CTPackTensorConfig, CTPackTensorWeight
from qload.loader import ConfiguredFormat

__all__ = [
    "CTIntConfig",
    "CTIntWeight",
    "CTPackConfig",
    "CTPackTensorConfig",
    "CTPackTensorWeight",
    "CTPackWeight",
]


def dialects(formats: tuple[ConfiguredFormat, ...]) -> tuple[ConfiguredFormat, ...]:
    """int-quantized with one scale per tensor or output, for a config with either kind.

    For a config with groups, one scale per output is a remainder of several scales.
    """
    integers = [
        fmt for fmt in formats if isinstance(fmt.config, CTIntConfig) and fmt.config.block in (None, (1, -1))
    ]
    return tuple(
        replace(fmt, config=replace(fmt.config, block=block))
        for fmt in integers
        for block in (None, (1, -1))
        if isinstance(fmt.config, CTIntConfig)
    )


FORMATS = (CTPackWeight, CTPackTensorWeight, CTIntWeight)
METHODS = ()  # read by detect.methods
