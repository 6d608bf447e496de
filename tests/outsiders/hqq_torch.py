"""Suite of HQQ's dequantization."""

from typing import Any

import pytest

from tests.outsiders.tensor_suite import DequantizedSuite

hqq = pytest.importorskip("hqq.core.quantize", exc_type=ImportError)
PACKING = {8: "8bit_u8", 4: "4bit_u8", 2: "2bit_u8"}


class TestDequantize(DequantizedSuite):
    """w = (code - zero) * scale in the type of the computation."""

    format = "hqq"
    subject = "Quantizer.dequantize"
    package = "hqq"

    def pack(self, weight: Any) -> Any:
        config = weight.config
        meta = {
            "compute_dtype": weight.scale.dtype,
            "packing": PACKING[config.bits],
            "view_as_float": False,
            "nbits": config.bits,
            "group_size": config.group_size,
            "axis": 1,
            "shape": tuple(weight.shape),
            "zero": weight.zero,
            "scale": weight.scale,
        }
        return hqq.Quantizer.dequantize(weight.weight, meta)
