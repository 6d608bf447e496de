"""Which CUDA device and stream are current, and memory on it: for every call, so as torch's own code asks."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# What torch's own generated code calls; a build of torch without CUDA has neither.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_empty_strided: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def empty_rows(like: Tensor, rows: int, columns: int) -> Tensor:
    """(rows, columns) of whatever was there, of the dtype of `like` and on its device, which is current."""
    if _empty_strided is None or not like.is_cuda:
        return like.new_empty(rows, columns)
    made: Tensor = _empty_strided((rows, columns), (columns, 1), like.dtype)
    return made


def stream_on(device: torch.device) -> int:
    """The stream that is current on a device."""
    if raw_stream is None or device.index is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(raw_stream(device.index))


def stream(tensor: Tensor) -> int:
    """The stream that is current on a tensor's device."""
    return stream_on(tensor.device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Within it, a device is the current one."""
    if current_device is not None and device.index == current_device():
        return nullcontext()
    return torch.cuda.device(device)
