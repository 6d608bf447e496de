"""Properties of tensors for plain torch and native code, and new tensors in large pages."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qload.errors import ArgumentError

PLAIN = (Tensor, torch.nn.Parameter)  # what is a tensor by another name has no memory of its own
BLOCK = 1 << 19  # elements that plain torch works on at a time, for each thread
FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # what values are rounded to, by native number
PAGE_BYTES, LARGE_PAGE_BYTES = 1 << 12, 1 << 21
MIN_ADVISED_BYTES = 2 * LARGE_PAGE_BYTES  # of a tensor that may hold a whole large page, wherever it starts
HUGEPAGE = 14  # MADV_HUGEPAGE of <sys/mman.h>


_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)  # of torch's own compiled models


def guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a check for tensors with equal types, devices, dtypes, shapes, strides and gradients.

    At least one tensor; the check keeps none. Comparisons in Python take the host four times as long.
    """
    if _TensorGuards is not None:
        check: Callable[..., bool] = _TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        return check
    forms = _forms(tensors)
    return lambda *others: _forms(others) == forms


def _forms(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [
        (type(each), each.device, each.dtype, each.shape, each.stride(), each.requires_grad)
        for each in tensors
    ]


def block(like: Tensor) -> int:
    """Elements per step of plain torch: as many as fit a CPU's caches, on other devices all."""
    if type(like) not in PLAIN or like.device.type != "cpu" or torch.compiler.is_compiling():
        return like.numel()
    return BLOCK * torch.get_num_threads()


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two plain tensors have one storage; False for subclasses."""
    if type(one) not in PLAIN or type(other) not in PLAIN or one.is_meta:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


def check_writable(out: object, argument: str = "out") -> None:
    """Check that torch may write to a tensor, and that no two elements overlap; ArgumentError."""
    if not isinstance(out, Tensor) or out.layout != torch.strided:
        got = f"a tensor with layout {out.layout}" if isinstance(out, Tensor) else type(out).__name__
        raise ArgumentError(argument, "a tensor of strides", got)
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(argument, "a tensor without gradients, or torch.no_grad()", "requires_grad")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(argument, "a tensor that was made outside of torch.inference_mode()", "one of it")
    reach = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)) if out.numel() else ():
        if size > 1 and stride < reach:
            raise ArgumentError(argument, "each element in a place of its own", f"strides {out.stride()}")
        reach += stride * (size - 1)


def is_plain(tensor: Tensor, device: str) -> bool:
    """Return whether native code may read a tensor: on this type of device, without gradients."""
    grad = tensor.requires_grad and torch.is_grad_enabled()
    if type(tensor) not in PLAIN or tensor.device.type != device or tensor.layout != torch.strided or grad:
        return False
    if tensor.is_conj() or tensor.is_neg():  # whose memory holds other values
        return False
    return tensor.data_ptr() % tensor.itemsize == 0  # a file may hold a tensor at an odd byte


def address(tensor: Tensor | None) -> int:
    """Address of a tensor; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def dense(words: Tensor) -> Tensor:
    """Contiguous, and also seen as bytes: an axis of one word may have any stride and be contiguous."""
    whole = words.contiguous()
    return whole if whole.stride(-1) == 1 else whole.clone(memory_format=torch.contiguous_format)


def in_large_pages(tensor: Tensor) -> Tensor:
    """Advise the system to use large pages for a new tensor, before its first write; returns it."""
    if type(tensor) not in PLAIN or tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return tensor
    advise, size = _madvise(), tensor.numel() * tensor.itemsize
    if advise is not None and size >= MIN_ADVISED_BYTES:
        start = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        whole = (tensor.data_ptr() + size - start) // PAGE_BYTES * PAGE_BYTES
        advise(ctypes.c_void_p(start), ctypes.c_size_t(whole), HUGEPAGE)
    return tensor


@cache
def _madvise() -> Any:
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def writable(like: Tensor, shape: Sequence[int], dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """A checked `out`, or a new tensor on the device of `like`."""
    if out is None:
        return in_large_pages(like.new_empty(shape, dtype=dtype))
    check_writable(out)
    apart = out.untyped_storage().data_ptr() != like.untyped_storage().data_ptr()
    got = tuple(out.shape), out.dtype, out.device
    if got != (tuple(shape), dtype, like.device) or not out.is_contiguous() or not (apart or not out.numel()):
        raise ArgumentError(
            "out",
            f"a contiguous {str(dtype).removeprefix('torch.')} tensor {tuple(shape)} on {like.device}, "
            "with no memory in common with what it is made of",
            f"{str(out.dtype).removeprefix('torch.')} {tuple(out.shape)} on {out.device}",
        )
    return out
