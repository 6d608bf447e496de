"""Any number of tokens times a weight in Marlin's order or strips: rounded to the type of x, then a GEMM.

No more than `SCRATCH` bytes of the rounded weight are there at once: as many columns as fit, one slice after
another, in memory that torch's allocator gives to each of them in turn.
"""

from typing import Any

import torch
from torch import Tensor

from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernels.cuda.inputs import in_rows
from qload.kernels.cuda.rounded import rounded
from qload.kernels.cuda.sums import in_float32
from qload.spec import Layer

SCRATCH = 235 << 20  # bytes of rounded columns: more are slower at 1024 tokens, fewer at 4096
EVEN = 1024  # columns, of which a slice has a multiple: tiles of the vendor's kernels divide it


@in_float32()
def run(call: Any, scratch: int | None = None) -> Tensor:
    """y (M, N); `scratch`: bytes of the rounded weight at once, but no fewer than `EVEN` columns."""
    if not call.is_k_full:  # groups are looked up for every row, and rows go back to their inputs
        w = rounded(_weight(call, g_idx=call.g_idx, perm=call.perm), call.x.dtype)
        return torch.nn.functional.linear(call.x, w[: call.N, : call.x.shape[1]], call.bias)
    x = in_rows(call, call.rows)
    weight = _weight(call)
    columns = max(
        EVEN, (SCRATCH if scratch is None else scratch) // (call.rows * x.element_size()) // EVEN * EVEN
    )
    if columns >= call.columns:
        return torch.nn.functional.linear(x, rounded(weight, x.dtype)[: call.N], call.bias)
    y: Tensor = x.new_empty(x.shape[0], call.N)
    for start in range(0, call.N, columns):
        stop = min(start + columns, call.N)
        w = rounded(weight, x.dtype, slice(start, min(start + columns, call.columns)))[: stop - start]
        if call.bias is None:
            torch.mm(x, w.T, out=y[:, start:stop])
        else:  # added before the one rounding, which addmm to rows that lie apart does not do
            y[:, start:stop] = torch.nn.functional.linear(x, w, call.bias[start:stop])
        del w  # before the next slice asks for its memory
    return y


def _weight(call: Any, **index: Tensor) -> GPTQMarlinWeight:
    """The weight as it is padded, of inputs in the order of its rows, or of `index`."""
    shape, zero_point = (call.columns, call.rows), call.zeros is not None
    config = type(call.weight_type.example)(
        call.bits, call.group_size, zero_point, bool(index), call.is_k_full
    )
    held = {"qweight": call.weights, "scales": call.scales, "qzeros": call.zeros, **index}
    made: GPTQMarlinWeight = call.weight_type.unchecked(
        config, Layer((shape[0],), shape[1], shape, "weight"), held
    )
    return made
