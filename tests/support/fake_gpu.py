"""A CUDA device without a GPU: tensors with shapes, dtypes and a device, but without values.

Within `fake_capture()`, a copy between device and host and a read of a number by the host are errors, the
same as during the capture of a CUDA graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qload.kernels import linear, plans

M = TypeVar("M", bound=nn.Module)
IN_PLACE = {
    "__iadd__": "add_",
    "__isub__": "sub_",
    "__imul__": "mul_",
    "__itruediv__": "div_",
    "__invert__": "bitwise_not",
}

PRINTED = (Tensor.__repr__, Tensor.__format__)


@contextmanager
def fake_capture() -> Iterator[None]:
    """Replace tensors with `device="cuda"` by fake ones, on a stream in graph capture."""
    recording = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
    ampere = mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0))
    # Under a dispatch mode, each call is an operator; its fake returns a shape and runs no kernel.
    unwatched = mock.patch.object(linear, "is_observed", plans.wants_gradients)
    waiting = mock.patch.object(torch.cuda, "synchronize", side_effect=AssertionError("the host waits"))
    with recording, ampere, waiting, unwatched, FakeTensorMode(), _NoHostCopy(), _Views():
        yield


def fake_like(tensor: Tensor) -> Tensor:
    """Return a fake tensor on the GPU with the shape and dtype of `tensor`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


def fake_module(module: M) -> M:
    """Replace the parameters and buffers of a module by fake tensors on the GPU; return the module."""
    for each in module.modules():
        for held in (each._parameters, each._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    fake = fake_like(tensor)
                    frozen = isinstance(tensor, nn.Parameter)
                    held[name] = nn.Parameter(fake, requires_grad=False) if frozen else fake  # type: ignore[assignment]
    return module


class _NoHostCopy(TorchDispatchMode):
    """Dispatch mode with an error for host tensors of operators; numbers (0 axes) are permitted."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        places = {each.device.type for each in tensors if each.ndim}
        assert places <= {"cuda", "meta"}, f"{func} is given a tensor of the host, or makes one"
        return result


class _Views(TorchFunctionMode):
    """Function mode with operators in place of the Python bindings of torch, for lack of a real device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _indexed(args[0], args[1])
        if func is Tensor.__setitem__:
            torch.ops.aten.copy_(_indexed(args[0], args[1]), args[2])
            return None
        assert func not in PRINTED, f"{func} prints numbers, for which the host waits"
        if func is Tensor.data_ptr:
            return 0
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "not linked" not in str(error):
                raise
            name = IN_PLACE.get(func.__name__, func.__name__)
            return getattr(torch.ops.aten, name)(*args, **(kwargs or {}))


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    """Return `tensor[index]`: a view, or a copy for an index with tensors of numbers."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [entry for entry in entries if not isinstance(entry, Tensor)]:
        at = next(place for place, entry in enumerate(entries) if entry is Ellipsis)
        axes = sum(entry is not None for entry in entries) - 1
        entries[at : at + 1] = [slice(None)] * (tensor.ndim - axes)
    numbers: list[Tensor | None] = []
    axis = 0
    for entry in entries:
        if entry is None:
            tensor = tensor.unsqueeze(axis)
        elif isinstance(entry, int):
            tensor = tensor.select(axis, entry)
            continue
        elif isinstance(entry, slice):
            tensor = torch.ops.aten.slice(tensor, axis, entry.start, entry.stop, entry.step or 1)
        else:
            numbers += [None] * (axis - len(numbers)) + [entry]
        axis += 1
    return torch.ops.aten.index(tensor, numbers) if numbers else tensor
