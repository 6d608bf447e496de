"""The native CUDA module, checks of the operands of each call, and the registration of operators."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qload.devices.cuda import current_device, empty_rows, raw_stream, stream
from qload.devices.tensors import address as pointer
from qload.errors import ArgumentError
from qload.native import load

__all__ = [
    "LIBRARY",
    "check",
    "check_operands",
    "current_device",
    "empty_rows",
    "native",
    "operator",
    "pointer",
    "raw_stream",
    "stream",
    "why_not",
]

LIBRARY = torch.library.Library("qload", "FRAGMENT")  # type: ignore[no-untyped-call]

load("cuda")  # before a model is compiled: what traces it cannot import


def why_not() -> str | None:
    """Why no native CUDA operator can run here, or None."""
    module = load("cuda")
    if module.found is None:
        return f"the native CUDA module is missing: {module.reason}"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def native() -> Any:
    """The module; the caller has asked `why_not`."""
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
    """Check the shape of each operand and `check` it; ArgumentError with its name."""
    for name, tensor, dtypes, shape in operands:
        check(name, tensor, like, *dtypes)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ArgumentError(name, f"shape {shape}", str(tuple(tensor.shape)))


def operator(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register `torch.ops.qload.NAME`; `schema`: without the name; `fake`: result on meta tensors."""
    LIBRARY.define(name + schema)  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, run, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"qload::{name}", fake, lib=LIBRARY)
