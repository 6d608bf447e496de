"""Inputs that are quantized as a weight declares, times that weight: codes are multiplied, then scaled.

    y[m, n] = rounded(row[m] * column[n] * sum over k of a[m, k] * b[n, k] + bias[n])

a: the codes of the inputs, less their zero points, where all inputs of a token share a scale, `row`. b: those
of the weight, where all inputs of an output do, `column`. Both are whole numbers below 2**8 or values of
small floats: bfloat16 holds each, float32 and the tensor cores' sums of them are all that rounds. Where only
one of both has such scales it is taken so, and what the other stands for is rounded to the type of x; of
float16 after it was divided by a power of two, so that no token leaves its range.

    sums of                           are made by
    e4m3 and e4m3 or e5m2 on CUDA     torch._scaled_mm, from 8.9 on, with scales of 1 and sums in float32
    int8 and int8 on CUDA             torch._int_mm, exact; tokens are padded to more than 16
    all others, and odd N and K       the product of bfloat16, float16 or float32 that `sums.wide` makes

A zero point z of the inputs takes z * sum over k of b[n, k] from an int8 sum: one more row of ones gives it.
The tensor cores add products of e4m3 with 13 bits of the largest one and less than float32 keeps: see
docs/cuda-cells.md for what that costs.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from qload.formats import CTIntWeight, Fp8Weight
from qload.kernels import sums
from qload.kernels.activations import E4M3, QuantizedActivations
from qload.kernels.carries import carries
from qload.kernels.slices import slices
from qload.spec import Weight, outputs, ranges

TILE = 16  # codes that the vendor reads at once: K and N are multiples
LEAST_TOKENS = 32  # of torch._int_mm, which refuses 16
MOST_INPUTS = 1 << 16  # whose sums of int8 times int8 int32 holds, zero points included
CODES = 48 << 20  # bytes of the weight's codes as bfloat16 at once, on a GPU
FP8 = (8, 9)  # the first chips whose tensor cores multiply e4m3
HALF_RANGE = 8  # of the exponents of float16: tokens are brought below 2**this
LEAST_EXPONENT = -100  # of what tokens are divided by, which float32 holds


def multiply(
    made: QuantizedActivations, weight: Weight, bias: Tensor | None, dtype: torch.dtype, narrow: torch.dtype
) -> Tensor:
    """What inputs (M, K) stand for, times what a weight means: (M, N) in a `dtype`, plus a bias (N,).

    `narrow`: the type that numbers are rounded to where no type holds them.
    """
    M, N = made.codes.shape[0], weight.layer.N
    y = made.codes.new_empty(M, N, dtype=dtype)
    for rows, found, row, column in _sums(made, weight, narrow):
        for tokens in sums.blocks(M, found.shape[1]):
            part = found[tokens].mul_(row if row.ndim < 2 else row[tokens])
            part = part if column is None else part.mul_(column)
            if bias is None:
                y[tokens, rows].copy_(part)
            else:
                torch.add(part, bias[rows], out=y[tokens, rows])
    return y


Sums = Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]


def _sums(made: QuantizedActivations, weight: Weight, narrow: torch.dtype) -> Sums:
    """Outputs after outputs: their sums (M, n), by what each token and each output is multiplied then."""
    wide = made.codes.dtype == torch.float64
    row, column = made.steps, None if wide else column_scales(weight)
    if row.shape[-1] == 1 and column is not None:
        whole = _by_the_vendor(made, weight, narrow)
        if whole is None:
            yield from _codes_times_codes(made, weight, column)
        else:
            yield slice(0, weight.layer.N), whole, row, column
        return
    narrow = made.codes.dtype if wide or not carries(weight, narrow) else narrow
    if row.shape[-1] == 1:
        taken = made.counted()
    else:
        taken = made.dequantize()
        row = _powers(taken)
        taken = taken / row
    taken = taken.to(narrow)
    for rows, w in slices(weight, narrow):
        yield rows, sums.wide(taken, w), row, None


def _powers(x: Tensor) -> Tensor:
    """A power of two for each token (M, 1), by which x is divided to lie below 2**`HALF_RANGE`."""
    largest = x.abs().amax(-1, keepdim=True) if x.numel() else x.new_zeros(x.shape[0], 1)
    exponent = torch.frexp(largest).exponent - HALF_RANGE
    return torch.exp2(exponent.clamp(min=LEAST_EXPONENT).to(x.dtype))


def _codes_times_codes(made: QuantizedActivations, weight: Weight, column: Tensor) -> Sums:
    """Codes of both sides as numbers of bfloat16, or on a CPU of float32, and the sums of their products."""
    on_gpu = made.codes.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    x = made.counted().to(dtype)
    most = (CODES if on_gpu else CODES // 4) // (dtype.itemsize * max(1, weight.layer.K))
    for start, stop in ranges(weight, most):
        codes = outputs(weight, start, stop).codes()
        numbers = replace(codes, scales=torch.ones_like(codes.scales), factor=1.0, divide=False)
        w = numbers.dequantize(dtype)
        found = sums.wide(x, w)
        del w  # before the next slice asks for its memory
        yield slice(start, stop), found, made.steps, column[start:stop]


def column_scales(weight: Weight) -> Tensor | None:
    """(N,) float32: what a code of 1 is worth in each output, of any input; None where inputs differ."""
    if isinstance(weight, Fp8Weight):
        if weight.config.block is not None:
            return None
        scale = weight.weight_scale.float().reshape(-1)
        return _of_outputs(scale.reciprocal() if weight.config.divide else scale, weight.layer.parts)
    if isinstance(weight, CTIntWeight) and weight.config.block in (None, (1, -1)):
        return _of_outputs(weight.weight_scale.float().reshape(-1), weight.layer.parts)
    return None


def _of_outputs(scale: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Scales of all outputs: those that are stored for each, for the parts, or for the tensor."""
    if scale.numel() == sum(parts):
        return scale
    if scale.numel() == 1:
        return scale.expand(sum(parts))
    return torch.cat([one.expand(width) for one, width in zip(scale, parts, strict=True)])


def _by_the_vendor(made: QuantizedActivations, weight: Weight, narrow: torch.dtype) -> Tensor | None:
    """The sums (M, N) of stored codes, float32; None where the vendor does not take them.

    Sums of e4m3 are good enough for a result of 16 bits, not for one of float32.
    """
    stored = weight.fields()["weight"]
    (N, K), M = stored.shape, made.codes.shape[0]
    if stored.device.type != "cuda" or K % TILE or N % TILE or not M:
        return None
    if not stored.is_contiguous() or stored.data_ptr() % TILE:
        return None
    if stored.dtype == torch.int8:
        return of_int8(made, stored) if K < MOST_INPUTS and _is_symmetric(weight) else None
    if narrow not in sums.NARROW or stored.dtype not in (E4M3, torch.float8_e5m2):
        return None
    if torch.cuda.get_device_capability(stored.device) < FP8:
        return None
    one = torch.ones((), device=stored.device)
    x = made.codes.to(E4M3)
    found: Tensor = torch._scaled_mm(x, stored.T, one, one, out_dtype=torch.float32, use_fast_accum=False)
    return found


def _is_symmetric(weight: Weight) -> bool:
    return isinstance(weight, CTIntWeight) and weight.weight_zero_point is None


def of_int8(made: QuantizedActivations, stored: Tensor) -> Tensor:
    """Exact sums, rounded once; with a zero point of the inputs the sums of the weight's codes are needed."""
    M, zeros = made.codes.shape[0], made.zero_points
    rows = M + (zeros is not None)
    x = pad(made.codes.to(torch.int8), (0, 0, 0, max(LEAST_TOKENS, -(-rows // TILE) * TILE) - M))
    if zeros is not None:
        x[M].fill_(1)
    found = torch._int_mm(x, stored.T)
    exact = found[:M]
    if zeros is not None:
        exact = exact - zeros.to(torch.int32) * found[M]
    return exact.float()
