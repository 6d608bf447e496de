"""Codes of inputs times codes of a weight in strips, both of 8 bits: csrc/cuda/many/w8a8.cuh."""

from typing import Any

import torch
from torch import Tensor

from qload.kernels.cuda import hopper_gemm, launch
from qload.kernels.cuda.hopper_gemm import ManyDivision
from qload.kernels.cuda.launch import Launch
from qload.kernels.cuda.module import empty_rows, native, pointer, stream
from qload.kernels.cuda.quantize import EIGHT, RoundedInputs, group_of
from qload.spec import ActivationScheme

NAME = "w8a8"
INT8, E4M3 = 0x108, 0x208  # numbers of the codes in csrc/cuda/device/code.h
TYPES = {INT8: "int", E4M3: "float"}  # of a scheme
TIMED_AS = {INT8: hopper_gemm.INT8_CODES, E4M3: hopper_gemm.E4M3_CODES}
MAX_INPUTS = (2**31 - 1) // 2**14  # of products of two int8, the sums of which int32 holds


def why_not_scheme(code: int, scheme: ActivationScheme | None, K: int) -> str | None:
    """Reason why inputs by a scheme are no codes for a weight of a code and K inputs, or None."""
    if scheme is None:
        return "inputs are not quantized"
    symmetric = scheme.symmetric and scheme.zero_point is None
    if TYPES.get(code) != scheme.type or scheme.bits != 8 or not symmetric:
        return f"inputs by {scheme} are no codes of the type of the weight's"
    if group_of(scheme, K):
        return f"needs one scale for each token, got groups of {scheme.size}"
    if code == INT8 and not scheme.dynamic:
        return "no code of int8 stands for NaN, nor does a stored scale"
    if code == INT8 and K > MAX_INPUTS:
        return f"int32 holds sums of at most {MAX_INPUTS} products, got K = {K}"
    return None


def why_not(call: Any) -> str | None:
    """Reason why this kernel does not take a call, or None."""
    reason = why_not_scheme(call.code, call.scheme, call.x.shape[1])
    return reason or hopper_gemm.why_not(call)


def prepare(call: Any, x: Tensor, how: ManyDivision | None = None) -> Launch:
    """Launch of calls like this one for codes of x; `how`: by default the fastest division."""
    how = how or hopper_gemm.division(call.tokens, call.rows, call.columns, TIMED_AS[call.code])
    sizes = launch.sizes(call, x)
    sizes[3] = RoundedInputs.width(sizes[3])
    kind = call.code, call.group, call.offset_zero, x.dtype == torch.bfloat16, [int(each) for each in how]
    start = native().w8a8(sizes, *kind, call.early)
    return Launch(start, how.slices * call.tokens * call.columns if how.slices > 1 else 0, coded=True)


def run(call: Any, how: ManyDivision | None = None) -> Tensor:
    """y (M, N) of inputs by the call's scheme; `how`: by default the fastest division."""
    x = launch.in_rows(call, EIGHT)
    made = prepare(call, x, how)
    dtypes = None if call.stored is None else call.stored.dtype, None
    inputs = RoundedInputs(native(), x.dtype, x.shape[1], call.scheme, dtypes, coded=True)
    with torch.cuda.device(x.device):
        codes, factors = inputs.start(x, call.tokens, pointer(call.stored), 0, stream(x))
        y = empty_rows(x, call.tokens, call.N)
        parts = x.new_empty(made.scratch, dtype=torch.float32) if made.scratch else None
        weights, scales = pointer(call.weights), pointer(call.scales)
        rest = pointer(parts), pointer(call.bias), factors, pointer(y), stream(x)
        made.start(pointer(codes), weights, scales, 0, 0, *rest)
    return y
