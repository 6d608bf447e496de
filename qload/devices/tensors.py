"""What plain torch and native code ask of a tensor before they touch it."""

import torch
from torch import Tensor

from qload.errors import ArgumentError

PLAIN = (Tensor, torch.nn.Parameter)  # what is a tensor by another name has no memory of its own
BLOCK = 1 << 19  # elements that plain torch works on at a time, for each thread
FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # what values are rounded to, by native number


def block(like: Tensor) -> int:
    """How many elements plain torch works on at a time: what a CPU's caches hold, elsewhere all."""
    if type(like) not in PLAIN or like.device.type != "cpu" or torch.compiler.is_compiling():
        return like.numel()
    return BLOCK * torch.get_num_threads()


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in one storage; of tensors by another name nobody can tell."""
    if type(one) not in PLAIN or type(other) not in PLAIN or one.is_meta:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


def check_writable(out: object, argument: str = "out") -> None:
    """A tensor that torch lets be written to, each element in a place of its own, or ArgumentError."""
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
    """Whether native code may touch a tensor: it is on such a device, and its memory holds its values."""
    grad = tensor.requires_grad and torch.is_grad_enabled()
    if type(tensor) not in PLAIN or tensor.device.type != device or tensor.layout != torch.strided or grad:
        return False
    if tensor.is_conj() or tensor.is_neg():  # whose memory holds other values
        return False
    return tensor.data_ptr() % tensor.itemsize == 0  # a file may hold a tensor at an odd byte


def address(tensor: Tensor | None) -> int:
    """Where a tensor starts; 0 where there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def dense(words: Tensor) -> Tensor:
    """Contiguous, and also seen as bytes: an axis of one word may have any stride and be contiguous."""
    whole = words.contiguous()
    return whole if whole.stride(-1) == 1 else whole.clone(memory_format=torch.contiguous_format)
