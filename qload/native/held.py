"""Codes that are not spelled out as numbers, and what a code means: what a fused dequantize needs to know."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)  # what is a tensor by another name has no memory of its own
BLOCK = 1 << 19  # elements that plain torch works on at a time, for each thread
OUT = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # what values are rounded to


@dataclass(frozen=True)
class Meaning:
    """w[n, k] = (value of code[n, k] - zero) * scale * factor, or by the scale, in this order in float32.

    scales, zeros: float32 (R, G), row n_group[n] or n * R / N, column k_group[k] or k / run. `lookup`: the
    value of each code, float32; None: the code itself. Indices are int32.
    """

    scales: Tensor
    zeros: Tensor | None
    lookup: Tensor | None
    n_group: Tensor | None
    k_group: Tensor | None
    run: int
    divide: bool
    factor: float

    def of_rows(self, rows: slice) -> "Meaning":
        """That of some rows."""
        if self.n_group is not None:
            return replace(self, n_group=self.n_group[rows])
        if self.scales.shape[0] == 1:
            return self
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, scales=self.scales[rows], zeros=zeros)

    def tensors(self) -> Sequence[Tensor]:
        """All whose memory is read."""
        every = (self.scales, self.zeros, self.lookup, self.n_group, self.k_group)
        return [tensor for tensor in every if tensor is not None]


class LazyCodes(Protocol):
    """Integer codes (R, C), still packed."""

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C)."""

    @property
    def T(self) -> "Tensor | LazyCodes":
        """(C, R)."""

    def __getitem__(self, rows: Tensor) -> "Tensor | LazyCodes":
        """Row i is row rows[i]."""

    def plain(self) -> Tensor:
        """The codes as numbers, int32 or uint8 (R, C)."""

    def values(self, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
        """What the codes stand for, see `values`."""

    def dequantize(self, meaning: Meaning, out: Tensor) -> bool:
        """What the codes mean, in one pass from the words to `out`; False where nothing was done."""


def plain(codes: Tensor | LazyCodes) -> Tensor:
    """Codes as numbers, whether they still lie in words or not."""
    return codes if isinstance(codes, Tensor) else codes.plain()


def block(like: Tensor) -> int:
    """How many elements plain torch works on at a time: what a CPU's caches hold, elsewhere all."""
    if type(like) not in PLAIN or like.device.type != "cpu" or torch.compiler.is_compiling():
        return like.numel()
    return BLOCK * torch.get_num_threads()


def values(codes: Tensor | LazyCodes, lookup: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows after rows, about `count` codes at a time, and what they stand for, new float32 (rows, C).

    `lookup`: (2**bits,) what each code stands for; None: itself.
    """
    if not isinstance(codes, Tensor):
        yield from codes.values(lookup, count)
        return
    R, C = codes.shape
    step = max(1, count // max(C, 1))
    for start in range(0, R, step):
        rows = slice(start, min(start + step, R))
        yield rows, stood_for(codes[rows], lookup)


def stood_for(codes: Tensor, lookup: Tensor | None) -> Tensor:
    """What codes stand for, new float32."""
    if lookup is None:
        return codes.to(torch.float32, memory_format=torch.contiguous_format)
    return lookup.gather(0, codes.flatten().long()).view(codes.shape)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in one storage; of tensors by another name nobody can tell."""
    if type(one) not in PLAIN or type(other) not in PLAIN or one.is_meta:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


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
