"""Faults of multiplying: inputs and outputs in wrong places, a tail left out, memory not written."""

from collections.abc import Callable

import torch
from torch import Tensor

from qload.testing.kernel_faults.fault import Gemm, KernelFault

TAIL = 4  # outputs, or inputs
TOKENS = 16  # of a tile


def _outputs(change: Callable[[Tensor], Tensor]) -> Callable[[Gemm, int], Gemm]:
    return lambda product, N: lambda x: change(product(x).clone())


def _inputs(change: Callable[[Tensor], Tensor]) -> Callable[[Gemm, int], Gemm]:
    return lambda product, N: lambda x: product(change(x.clone()))


def _halves(y: Tensor) -> Tensor:
    return y.roll(y.shape[-1] // 2, -1)


def _interleaved(y: Tensor) -> Tensor:
    if y.shape[-1] % 2:
        return y
    return y.reshape(*y.shape[:-1], 2, -1).transpose(-1, -2).reshape(y.shape)


def _tail(value: float) -> Callable[[Tensor], Tensor]:
    def changed(tensor: Tensor) -> Tensor:
        tensor[..., -TAIL:] = value
        return tensor

    return changed


def _first_tile_alone(y: Tensor) -> Tensor:
    y[TOKENS:] = 0
    return y


def _first_half_everywhere(y: Tensor) -> Tensor:
    half = y.shape[-1] // 2
    y[..., half : 2 * half] = y[..., :half]
    return y


FAULTS = (
    KernelFault(
        "gate-and-up", "the halves of outputs exchanged", ("parts-exchanged",), around=_outputs(_halves)
    ),
    KernelFault(
        "outputs-interleaved",
        "outputs of two parts taking turns",
        ("parts-interleaved",),
        around=_outputs(_interleaved),
    ),
    KernelFault(
        "outputs-late", "outputs one on", ("outputs-shifted",), around=_outputs(lambda y: y.roll(1, -1))
    ),
    KernelFault("outputs-left-out", "the last outputs left out", ("left-out",), around=_outputs(_tail(0.0))),
    KernelFault(
        "outputs-not-written",
        "the last outputs never written",
        ("never-written",),
        around=_outputs(_tail(torch.nan)),
    ),
    KernelFault(
        "tokens-left-out",
        "all tokens but those of the first tile left out",
        ("left-out",),
        around=_outputs(_first_tile_alone),
    ),
    KernelFault(
        "share-of-rank-0",
        "the first half of outputs in the second half too",
        ("rank-0-everywhere",),
        around=_outputs(_first_half_everywhere),
    ),
    KernelFault("inputs-late", "inputs one on", ("inputs-shifted",), around=_inputs(lambda x: x.roll(1, -1))),
    KernelFault("inputs-left-out", "the last inputs left out", ("left-out",), around=_inputs(_tail(0.0))),
    KernelFault(
        "inputs-reversed",
        "inputs in the reverse order",
        ("outputs-reversed",),
        around=_inputs(lambda x: x.flip(-1)),
    ),
    KernelFault("result-doubled", "every result doubled", ("factor",), around=_outputs(lambda y: 2 * y)),
)
