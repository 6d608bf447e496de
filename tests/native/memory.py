"""What native routines are tried with: every instruction set, threads, odd places in memory, guard zones."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from qload import native
from qload.testing import assert_same_bits
from tests.example_counts import at_most
from tests.kernels.cpu_by_hand import Hand

GUARD = 64  # elements on either side
MARK = 0x5A

few = at_most(30 if native.available() else 2)  # of each of many packings or formats
threads = st.integers(1, 8)
offsets = st.integers(0, 17)  # elements past a boundary of 64 bytes


@contextmanager
def guarded(shape: Sequence[int], dtype: torch.dtype, offset: int) -> Iterator[Tensor]:
    """A tensor at an odd place of a larger one; nothing around it may have changed in the end."""
    count = torch.Size(shape).numel()
    around = torch.full(((count + offset + 2 * GUARD) * dtype.itemsize,), MARK, dtype=torch.uint8).view(dtype)
    start = GUARD + offset
    inside = around[start : start + count]
    yield inside.view(*shape)
    outside = torch.cat([around[:start], around[start + count :]])
    assert bool((outside.view(torch.uint8) == MARK).all()), "bytes around the tensor were written"


def placed(tensor: Tensor, offset: int) -> Tensor:
    """The same values at an odd place in memory."""
    around = tensor.new_empty(tensor.numel() + offset)
    return around[offset:].view(tensor.shape).copy_(tensor)


def isas() -> tuple[str, ...]:
    """Instruction sets of the built module, else of `Hand`; QLOAD_ISA selects one."""
    asked = os.environ.get("QLOAD_ISA")
    return tuple(isa for isa in native.available() or Hand.isas() if asked in (None, isa))


ISAS = pytest.mark.parametrize("isa", isas())


def each_isa(work: Callable[[], Tensor], count: int) -> None:
    """The same bits by plain torch and by every instruction set of this machine."""
    with native.reference():
        want = work()
    for isa in isas():
        with native.using(isa, count):
            assert_same_bits(work(), want)
