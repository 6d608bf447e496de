"""Any number of tokens times a weight in Marlin's order or strips: rounded to the type of x, then a GEMM.

One slice of columns after another, as `qload.kernels.products` does it for every weight.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernels import products
from qload.kernels.cuda.launch import in_rows
from qload.spec import Layer


def run(call: Any, scratch: int | None = None) -> Tensor:
    """y (M, N); `scratch`: bytes of the rounded weight at once, but no fewer columns than a tile has."""
    if not call.is_k_full:  # groups are looked up for every row, and rows go back to their inputs
        weight = _weight(call, call.x.shape[1], g_idx=call.g_idx, perm=call.perm)
        return products.in_slices(call.x, weight, call.bias, scratch=scratch, count=call.N)
    x, weight = in_rows(call, call.rows), _weight(call, call.rows)
    return products.in_slices(x, weight, call.bias, scratch=scratch, count=call.N)


def _weight(call: Any, K: int, **index: Tensor) -> GPTQMarlinWeight:
    """The weight with its padded columns and K rows, of inputs in the order of its rows, or of `index`."""
    columns, zero_point = call.columns, call.zeros is not None
    config: Any = type(call.weight_type.example)(
        call.bits, call.group_size, zero_point, bool(index), call.is_k_full
    )
    held = {"qweight": call.weights, "scales": call.scales, "qzeros": call.zeros, **index}
    if call.offset_zero >= 0:
        config = replace(config, zero_point=False, offset="weight", zero=call.offset_zero)
        held["offsets"] = held.pop("qzeros")
    made: GPTQMarlinWeight = call.weight_type.unchecked(
        config, Layer((columns,), K, (columns, K), "weight"), held
    )
    return made
