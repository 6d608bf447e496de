"""Where what a weight means is written, if the caller says where."""

import torch
from torch import Tensor

from qload import devices
from qload.errors import ArgumentError, ShapeError
from qload.spec.tensor import Shape


def check_out(out: Tensor, shape: Shape, device: torch.device, *read: Tensor) -> None:
    """A tensor that what is meant can be written to, element by element, while others are read."""
    if not isinstance(out, Tensor):
        raise ArgumentError("out", "a tensor", type(out).__name__)
    if tuple(out.shape) != tuple(shape):
        raise ShapeError("out", f"{tuple(shape)}, as the weight", tuple(out.shape))
    if out.device != device or not out.dtype.is_floating_point:
        raise ArgumentError("out", f"floats on {device}", f"{out.dtype} on {out.device}")
    reach = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)) if out.numel() else ():
        if size > 1 and stride < reach:
            raise ArgumentError("out", "each element in a place of its own", f"strides {out.stride()}")
        reach += stride * (size - 1)
    if any(devices.shares_memory(out, tensor) for tensor in read):
        raise ArgumentError("out", "memory of its own", "that of one of the weight's tensors")


def rounded(exact: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """What a weight means in a dtype, or in `out`, whose dtype it takes."""
    if out is None:
        return exact.to(dtype)
    check_out(out, tuple(exact.shape), exact.device)
    return out.copy_(exact)
