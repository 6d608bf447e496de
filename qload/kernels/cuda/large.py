"""Any number of tokens times a weight in Marlin's order or strips: rounded to the type of x, then a GEMM.

No more than `SCRATCH` bytes of the rounded weight are there at once: as many columns as fit, one slice after
another, in memory that torch's allocator gives to each of them in turn.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernels.cuda.dequantize import dequantize, of_words
from qload.kernels.cuda.inputs import in_rows
from qload.kernels.cuda.stored import Packed, packed
from qload.kernels.cuda.sums import in_float32
from qload.layouts import marlin
from qload.spec import Layer

SCRATCH = 235 << 20  # bytes of rounded columns: more are slower at 1024 tokens, fewer at 4096
EVEN = 1024  # columns, of which a slice has a multiple: tiles of the vendor's kernels divide it


@in_float32()
def run(call: Any, scratch: int | None = None) -> Tensor:
    """y (M, N); `scratch`: bytes of the rounded weight at once, but no fewer than `EVEN` columns."""
    if not call.is_k_full:  # groups are looked up for every row, and rows go back to their inputs
        w = dequantize(_weight(call, g_idx=call.g_idx, perm=call.perm), call.x.dtype)
        return torch.nn.functional.linear(call.x, w[: call.N, : call.x.shape[1]], call.bias)
    x = in_rows(call, call.rows)
    found = packed(_weight(call))
    assert found is not None  # the layer as it is padded has whole words
    columns = max(
        EVEN, (SCRATCH if scratch is None else scratch) // (call.rows * x.element_size()) // EVEN * EVEN
    )
    if columns >= call.columns:
        return torch.nn.functional.linear(x, of_words(found, x.dtype)[: call.N], call.bias)
    y: Tensor = x.new_empty(x.shape[0], call.N)
    for start in range(0, call.N, columns):
        stop = min(start + columns, call.N)
        w = of_words(_slice(found, start, min(start + columns, call.columns)), x.dtype)[: stop - start]
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


def _slice(whole: Packed, start: int, stop: int) -> Packed:
    """Columns [start, stop) of a weight, whole tiles."""
    tile = marlin.TILE_N << whole.row_bits
    tiles = (stop - start) // marlin.TILE_N
    scales, zeros, *rest, _, K = whole.meaning
    apart = next(digit[1] for digit in whole.digits if digit[2] == tile)  # codes, from a tile to the next
    first = start // marlin.TILE_N * apart * whole.bits // 32
    here = scales.view(-1)[start:], None if zeros is None else zeros.view(-1)[start * whole.bits // 32 :]
    return replace(
        whole,
        codes=whole.codes.view(-1)[first:],
        digits=[(tiles, *digit[1:]) if digit[2] == tile else digit for digit in whole.digits],
        meaning=(*here, *rest, stop - start, K),
    )
