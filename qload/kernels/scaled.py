"""Products of quantized inputs and a weight: codes are multiplied, then scaled.

    y[m, n] = rounded(row[m] * column[n] * sum over k of a[m, k] * b[n, k] + bias[n])

a: the codes of the inputs, less their zero points, where all inputs of a token share a scale, `row`. b: those
of the weight, where all inputs of an output do, `column`. Both are whole numbers below 2**8 or values of
small floats: bfloat16 holds each, float32 and the tensor cores' sums of them are all that rounds. Where only
one of both has such scales it is taken so, and what the other stands for is rounded to the type of x; of
float16 after it was divided by a power of two, so that no token leaves its range.

    sums of                           are made by
    any and a weight in strips        CUDA kernels of 16-bit inputs, which multiply the sums by `row` too, and
                                      of e4m3 and e4m3, int8 and int8 from some number of tokens on
    e4m3 and e4m3 or e5m2 on CUDA     torch._scaled_mm, from 8.9 on, with scales of 1 and sums in float32
    int8 and int8 on CUDA             torch._int_mm, exact; tokens are padded to more than 16
    int8 and int8 on a CPU            the CPU module, exact
    all others that it reads          the CPU module, of weights in float32
    all others, and odd N and K       the product of bfloat16, float16 or float32 that `wide_product` makes

A zero point z of the inputs takes z * sum over k of b[n, k] from an int8 sum: one more row of ones gives it.
The tensor cores add products of e4m3 with 13 bits of the largest one and less than float32 keeps: see
docs/lab/fallback.md for what that costs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qload.formats import CTIntWeight, Fp8Weight
from qload.kernels import cpu
from qload.kernels.activations import E4M3, QuantizedActivations
from qload.kernels.cpu import KeptRows, sums_of_codes
from qload.kernels.cuda.linear import multiply_codes, multiply_rounded, scales_tokens
from qload.kernels.cuda.quantize import NativeInputs, finish
from qload.kernels.products import NARROW, fits_float16, token_blocks, weight_slices, wide_product
from qload.kernels.quantized_inputs import Inputs, MadeInputs
from qload.spec import Weight, expand_parts, outputs, ranges

TILE = 16  # codes that the vendor reads at once: K and N are multiples
LEAST_TOKENS = 32  # of torch._int_mm, which refuses 16
MOST_INPUTS = 1 << 16  # whose sums of int8 times int8 int32 holds, zero points included
CODES = 48 << 20  # bytes of the weight's codes as bfloat16 at once, on a GPU
UNROUNDED = 16  # tokens of bfloat16 up to which a CPU's kernels round no weight to their type
FP8 = (8, 9)  # the first chips whose tensor cores multiply e4m3


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums (M, n) of some outputs, and their factors by token and by output.

    found: float32 or float64, or int32, with zero points of the inputs one row more: what each takes off.
    """

    outputs: slice
    found: Tensor
    row: Tensor
    column: Tensor | None = None
    zeros: Tensor | None = None


def multiply(
    inputs: Inputs,
    weight: Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    narrow: torch.dtype,
    kept: KeptRows | None = None,
) -> Tensor:
    """Values of inputs (M, K) times values of a weight: (M, N) in a `dtype`, plus a bias (N,).

    `narrow`: the type that numbers are rounded to where no type holds them. `kept`: what a CPU keeps of the
    weight from call to call.
    """
    whole = _by_cuda_kernels(inputs, weight, bias, dtype)
    if whole is not None:
        return whole
    y = inputs.x.new_empty(inputs.x.shape[0], weight.layer.N, dtype=dtype)
    for each in _sums(inputs, weight, narrow, kept):
        into, added = y[:, each.outputs], None if bias is None else bias[each.outputs]
        if not finish(each.found, each.row, each.column, each.zeros, added, into):
            _finish(each, added, into)
    return y


def _by_cuda_kernels(
    inputs: Inputs, weight: Weight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """y (M, N) by kernels of the weight that multiply codes, or sums of 16-bit inputs by factors, or None."""
    if not inputs.x.is_cuda or inputs.wide or dtype not in NARROW or not scales_tokens(weight):
        return None
    if isinstance(inputs, NativeInputs) and inputs.x.dtype == dtype:
        y = multiply_codes(inputs.x, inputs.scheme, inputs.stored[0], weight, bias)
        if y is not None:
            return y
    if inputs.one_step:
        numbers = inputs.counted(dtype)
        row = inputs.steps
    else:
        numbers, row = inputs.meant(dtype)
    factors = row.float().reshape(-1).expand(numbers.shape[0]).contiguous()
    return multiply_rounded(numbers, factors, weight, bias)


def _finish(each: Sums, bias: Tensor | None, y: Tensor) -> None:
    """y (M, n), in plain torch."""
    found = exact(each.found, each.zeros, y.shape[0]) if each.found.dtype == torch.int32 else each.found
    for tokens in token_blocks(*y.shape):
        part = found[tokens].mul_(each.row if each.row.ndim < 2 else each.row[tokens])
        part = part if each.column is None else part.mul_(each.column)
        if bias is None:
            y[tokens].copy_(part)
        else:
            torch.add(part, bias, out=y[tokens])


def _sums(inputs: Inputs, weight: Weight, narrow: torch.dtype, kept: KeptRows | None) -> Iterator[Sums]:
    """Outputs after outputs."""
    column = None if inputs.wide else column_scales(weight)
    if inputs.one_step and column is not None:
        whole = _of_stored_codes(inputs, weight, narrow)
        if whole is not None:
            found, zeros = whole
            yield Sums(slice(0, weight.layer.N), found, _step_of_each(inputs), column, zeros)
            return
    by_kernel = None if inputs.wide else _by_a_kernel(inputs, weight, kept)
    if by_kernel is not None:
        yield by_kernel
        return
    if inputs.one_step and column is not None:
        yield from _codes_times_codes(inputs, weight, column)
        return
    if inputs.wide:
        narrow = torch.float64
    elif not fits_float16(weight, narrow):
        narrow = torch.float32
    if inputs.one_step:
        taken = inputs.counted(narrow)
        row = inputs.steps
    else:
        taken, row = inputs.meant(narrow)
    for rows, w in weight_slices(weight, narrow):
        yield Sums(rows, wide_product(taken, w), row)


def _codes_times_codes(inputs: Inputs, weight: Weight, column: Tensor) -> Iterator[Sums]:
    """Codes of both sides as numbers of bfloat16, or on a CPU of float32, and the sums of their products."""
    on_gpu = inputs.x.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    x = inputs.counted(dtype)
    most = (CODES if on_gpu else CODES // 4) // (dtype.itemsize * max(1, weight.layer.K))
    for start, stop in ranges(weight, most):
        codes = outputs(weight, start, stop).codes()
        numbers = replace(codes, scales=torch.ones_like(codes.scales), factor=1.0, divide=False)
        w = numbers.dequantize(dtype)
        found = wide_product(x, w)
        del w  # before the next slice asks for its memory
        yield Sums(slice(start, stop), found, inputs.steps, column[start:stop])


def _by_a_kernel(inputs: Inputs, weight: Weight, kept: KeptRows | None) -> Sums | None:
    """Sums by a CPU kernel of the inputs' values, or None.

    Codes of few tokens that have one scale each are taken as bfloat16, which holds them, where a kernel does.
    """
    if inputs.x.device.type != "cpu":
        return None
    if inputs.one_step:
        x, row = inputs.counted(torch.bfloat16), inputs.steps
        few = x.shape[0] <= UNROUNDED
        y = cpu.multiply(x, weight, kept=kept, dtype=torch.float32) if few else None
    else:
        (x, row), y = inputs.meant(torch.float32), None
    y = cpu.multiply(x.float(), weight, kept=kept) if y is None else y
    return None if y is None else Sums(slice(0, weight.layer.N), y, row)


def _step_of_each(inputs: Inputs) -> Tensor:
    """Values of code 1; NaN for a token with NaN, as no integer is."""
    if inputs.x.device.type != "cpu":
        return inputs.steps
    return torch.where(inputs.x.isnan().any(-1, keepdim=True), torch.nan, inputs.steps)


def column_scales(weight: Weight) -> Tensor | None:
    """Value (N,) of code 1 per output, in float32; None if it differs between inputs."""
    if isinstance(weight, Fp8Weight):
        if weight.config.block is not None:
            return None
        scale = weight.weight_scale.float().reshape(-1)
        return _of_outputs(scale.reciprocal() if weight.config.divide else scale, weight.layer.parts)
    if isinstance(weight, CTIntWeight) and weight.config.block in (None, (1, -1)):
        return _of_outputs(weight.weight_scale.float().reshape(-1), weight.layer.parts)
    return None


def _of_outputs(scale: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Scales per output, from those per output, per part, or per tensor."""
    if scale.numel() == sum(parts):
        return scale
    return expand_parts(scale, parts)


def _of_stored_codes(
    inputs: Inputs, weight: Weight, narrow: torch.dtype
) -> tuple[Tensor, Tensor | None] | None:
    """Sums of stored codes, and zero points, as in `Sums`; None without a kernel.

    On CUDA the vendor does, on a CPU the CPU module. Sums of e4m3 are good enough for a result of 16 bits,
    not for one of float32.
    """
    stored = weight.fields()["weight"]
    (N, K), M = stored.shape, inputs.x.shape[0]
    if stored.device.type == "cpu":
        return _of_stored_int8(inputs, weight, stored)
    if stored.device.type != "cuda" or K % TILE or N % TILE or not M:
        return None
    if not stored.is_contiguous() or stored.data_ptr() % TILE:
        return None
    if stored.dtype == torch.int8:
        return _sums_of_int8(inputs, stored) if K < MOST_INPUTS and _is_symmetric(weight) else None
    if narrow not in NARROW or stored.dtype not in (E4M3, torch.float8_e5m2):
        return None
    if torch.cuda.get_device_capability(stored.device) < FP8:
        return None
    one = torch.ones((), device=stored.device)
    x = inputs.codes(E4M3)
    found: Tensor = torch._scaled_mm(x, stored.T, one, one, out_dtype=torch.float32, use_fast_accum=False)
    return found, None


def _of_stored_int8(inputs: Inputs, weight: Weight, stored: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """The same on a CPU."""
    scheme = weight.activations
    if stored.dtype != torch.int8 or scheme is None or scheme.type != "int" or not _is_symmetric(weight):
        return None
    found = sums_of_codes(inputs.codes(torch.int8, inputs.x.shape[0] + inputs.has_zeros), stored)
    return None if found is None else (found, inputs.zero_points)


def _is_symmetric(weight: Weight) -> bool:
    return isinstance(weight, CTIntWeight) and weight.weight_zero_point is None


def of_int8(made: QuantizedActivations, stored: Tensor) -> Tensor:
    """Exact sums, rounded once; with a zero point of the inputs the sums of the weight's codes are needed."""
    return exact(*_sums_of_int8(MadeInputs(made), stored), made.codes.shape[0])


def _sums_of_int8(inputs: Inputs, stored: Tensor) -> tuple[Tensor, Tensor | None]:
    """Sums int32 (M, N), or (M + 1, N) and zero points; tokens are padded."""
    M = inputs.x.shape[0]
    rows = M + inputs.has_zeros
    x = inputs.codes(torch.int8, max(LEAST_TOKENS, -(-rows // TILE) * TILE))
    return torch._int_mm(x, stored.T)[:rows], inputs.zero_points


def exact(found: Tensor, zeros: Tensor | None, M: int) -> Tensor:
    """int32 sums less the part of the zero points, by the last row: (M, N), rounded to float32."""
    whole = found[:M]
    return (whole if zeros is None else whole - zeros.to(torch.int32) * found[M]).float()
