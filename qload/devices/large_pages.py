"""New tensors in large pages: to be given fresh memory costs more than to fill it, most of all page by page.

Linux mostly gives large pages to who asks for them. Where it does not know how, or another system runs,
nothing happens: the advice changes no value and needs no permission.
"""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qload.devices.tensors import PLAIN, check_writable
from qload.errors import ArgumentError

PAGE, LARGE = 1 << 12, 1 << 21  # bytes
LEAST = 2 * LARGE  # of a tensor that may hold a whole large page, wherever it starts
HUGEPAGE = 14  # MADV_HUGEPAGE of <sys/mman.h>


def in_large_pages(tensor: Tensor) -> Tensor:
    """The same tensor, which was allocated just now and not written yet."""
    if type(tensor) not in PLAIN or tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return tensor
    advise, size = _madvise(), tensor.numel() * tensor.itemsize
    if advise is not None and size >= LEAST:
        start = -(-tensor.data_ptr() // PAGE) * PAGE
        whole = (tensor.data_ptr() + size - start) // PAGE * PAGE
        advise(ctypes.c_void_p(start), ctypes.c_size_t(whole), HUGEPAGE)
    return tensor


@cache
def _madvise() -> Any:
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def writable(like: Tensor, shape: Sequence[int], dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """A tensor to write to: `out`, which has to be one, or a new one on the device of another."""
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
