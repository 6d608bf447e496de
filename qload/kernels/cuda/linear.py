"""x times a weight in Marlin's order on a CUDA device: one kernel up to 64 tokens, the vendor's above."""

from typing import Any

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels.cuda.dequantize import dequantize
from qload.kernels.cuda.library import operator
from qload.kernels.cuda.module import check, native, pointer, stream, why_not
from qload.kernels.marlin import GPTQMarlinWeight

MOST_TOKENS = 64
ACTIVATIONS = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)


def why_not_linear(weight: GPTQMarlinWeight, dtype: torch.dtype) -> str | None:
    """Why a weight cannot be multiplied as it lies, or None; of its device, dtypes and config."""
    reason = why_not()
    if reason:
        return reason
    config, device = weight.config, weight.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"needs a CUDA device of capability 8.0, the weight is on {device}"
    if config.bits != 4:
        return f"reads 4 bits, got {config.bits}"
    if dtype not in ACTIVATIONS or weight.scales.dtype != dtype:
        return f"needs float16 or bfloat16 of both, got {dtype} activations, {weight.scales.dtype} scales"
    if config.act_order and not config.is_k_full:
        return "rows of a permuted group are missing here, and it counts groups by their size"
    return None


def takes(x: Tensor, weight: GPTQMarlinWeight, bias: Tensor | None) -> bool:
    """Whether `linear` multiplies this: a weight that fits, a bias in x's dtype, no gradient asked for."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    same = bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    return same and not wanted and why_not_linear(weight, x.dtype) is None


def linear(x: Tensor, weight: GPTQMarlinWeight, bias: Tensor | None = None) -> Tensor:
    """(..., K) -> (..., N) in x's dtype, sums in float32; asks nobody whether the weight fits."""
    N, K = weight.shape
    rows = x.reshape(-1, K)
    if rows.shape[0] > MOST_TOKENS:
        return torch.nn.functional.linear(x, dequantize(weight, x.dtype), bias)
    y: Tensor = torch.ops.qload.w4a16(
        rows.contiguous(),
        weight.qweight,
        weight.scales,
        weight.qzeros,
        weight.perm,
        bias,
        N,
        weight.config.group_size,
    )
    return y.reshape(*x.shape[:-1], N)


def _w4a16(
    x: Tensor,
    weights: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    perm: Tensor | None,
    bias: Tensor | None,
    N: int,
    group_size: int,
    columns: int = 0,
    split: int = 0,
    early: bool = True,
) -> Tensor:
    rows, padded = weights.shape[0] * 16, weights.shape[1] // 2
    group = rows if group_size == -1 else group_size
    for name, tensor, dtypes in (
        ("x", x, ACTIVATIONS),
        ("weights", weights, (torch.int32,)),
        ("scales", scales, (x.dtype,)),
        ("zeros", zeros, (torch.int32,)),
        ("perm", perm, (torch.int32,)),
        ("bias", bias, (x.dtype,)),
    ):
        check(name, tensor, x, *dtypes)
    shapes: tuple[tuple[str, Tensor | None, tuple[int, ...]], ...] = (
        ("scales", scales, (-(-rows // group), padded)),
        ("zeros", zeros, (-(-rows // group), padded // 8)),
        ("perm", perm, (rows,)),
        ("bias", bias, (N,)),
    )
    for name, tensor, shape in shapes:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ArgumentError(name, f"shape {shape}", str(tuple(tensor.shape)))
    if group not in (32, 64, 128, rows) or x.ndim != 2 or not (0 < x.shape[1] <= rows and padded >= N):
        raise ArgumentError("x", f"(M, K) of a layer of at most {rows} x {padded}", str(tuple(x.shape)))
    y = x.new_empty(x.shape[0], N)
    with torch.cuda.device(x.device):
        native().w4a16(
            *map(pointer, (x, weights, scales, zeros, perm, bias, y)),
            [x.shape[0], rows, padded, x.shape[1], N],
            group,
            x.dtype == torch.bfloat16,
            columns,
            split,
            early,
            stream(x),
        )
    return y


def _fake(
    x: Tensor, weights: Tensor, scales: Tensor, zeros: Any, perm: Any, bias: Any, N: int, *rest: Any
) -> Tensor:
    return x.new_empty(x.shape[0], N)


operator(
    "w4a16",
    "(Tensor x, Tensor weights, Tensor scales, Tensor? zeros, Tensor? perm, Tensor? bias, int N, "
    "int group_size, int columns=0, int split=0, bool early=True) -> Tensor",
    _w4a16,
    _fake,
)
