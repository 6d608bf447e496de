"""The native CUDA module: whether it is here, and what every call of it needs."""

from typing import Any

import torch
from torch import Tensor

from qload.devices.cuda import current_device, empty_rows, raw_stream, stream
from qload.devices.tensors import address as pointer
from qload.errors import ArgumentError
from qload.native import load

__all__ = [
    "check",
    "check_operands",
    "current_device",
    "empty_rows",
    "native",
    "pointer",
    "raw_stream",
    "stream",
    "why_not",
]

load("cuda")  # before a model is compiled: what traces it cannot import


def why_not() -> str | None:
    """Why no native CUDA operator can run here, or None."""
    module = load("cuda")
    if module.found is None:
        return f"the native CUDA module is missing: {module.reason}"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def native() -> Any:
    """The module; who calls has asked `why_not`."""
    module = load("cuda")
    if module.found is None:
        raise ArgumentError(
            "qload", "a build with CUDA", f"the native CUDA module is missing: {module.reason}"
        )
    return module.found


def check(name: str, tensor: Tensor | None, like: Tensor, *dtypes: torch.dtype) -> None:
    """A contiguous tensor of one of some dtypes on the device of another, or ArgumentError."""
    if tensor is None:
        return
    if tensor.device != like.device or not tensor.is_contiguous():
        raise ArgumentError(
            name, f"contiguous, on {like.device}", f"strides {tensor.stride()}, on {tensor.device}"
        )
    if dtypes and tensor.dtype not in dtypes:
        raise ArgumentError(name, " or ".join(map(str, dtypes)), str(tensor.dtype))


def check_operands(
    like: Tensor, *operands: tuple[str, Tensor | None, tuple[torch.dtype, ...], tuple[int, ...]]
) -> None:
    """Each a tensor as `check` wants it, and of a shape, or ArgumentError that names it."""
    for name, tensor, dtypes, shape in operands:
        check(name, tensor, like, *dtypes)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ArgumentError(name, f"shape {shape}", str(tuple(tensor.shape)))
