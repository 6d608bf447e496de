"""What a weight means is written in: a dtype, or a tensor of the caller's."""

import torch
from torch import Tensor

from qload import devices
from qload.errors import ArgumentError, ShapeError
from qload.spec.tensor import Shape

FLOATS = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip


def check_float(dtype: object) -> None:
    """A dtype that weights are rounded to: others would cut values off, or have no sign. ArgumentError."""
    if dtype not in FLOATS:
        known = ", ".join(str(each).removeprefix("torch.") for each in FLOATS)
        raise ArgumentError("dtype", f"one of torch's {known}", str(dtype))


def check_out(out: Tensor, shape: Shape, device: torch.device, *read: Tensor) -> None:
    """A tensor that what is meant can be written to, element by element, while others are read."""
    devices.check_writable(out)
    if tuple(out.shape) != tuple(shape):
        raise ShapeError("out", f"{tuple(shape)}, as the weight", tuple(out.shape))
    if out.device != device or out.dtype not in FLOATS:
        raise ArgumentError("out", f"floats on {device}", f"{out.dtype} on {out.device}")
    if any(devices.shares_memory(out, tensor) for tensor in read):
        raise ArgumentError("out", "memory of its own", "that of one of the weight's tensors")


def rounded(exact: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """What a weight means in a dtype, or in `out`, whose dtype it takes."""
    if out is None:
        check_float(dtype)
        return exact.to(dtype)
    check_out(out, tuple(exact.shape), exact.device)
    return out.copy_(exact)
