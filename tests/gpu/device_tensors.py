"""Tensors on a device that its tests share, and the comparison with plain torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qload import native
from qload.formats import GPTQConfig, GPTQWeight
from qload.layouts import Stored
from qload.testing import assert_same_bits

GUARD = 64  # elements on either side that nobody may touch
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["float16", "bfloat16", "float32"]
)


def both(work: Callable[[], Tensor]) -> Tensor:
    with native.reference():
        want = work()
    got = work()
    assert_same_bits(got, want)
    return got


def codes_of(bits: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(2**bits, (rows, columns), dtype=torch.int32, generator=noise).cuda()


def placed(tensor: Tensor, offset: int) -> Tensor:
    """The same values at an odd place in memory."""
    return tensor.new_empty(tensor.numel() + offset)[offset:].view(tensor.shape).copy_(tensor)


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor between two guard zones, and all of its memory."""
    memory = torch.full((torch.Size(shape).numel() + 2 * GUARD,), 77, device="cuda", dtype=dtype)
    return memory[GUARD:-GUARD].view(shape), memory


def words(*shape: int, seed: int = 0) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=noise).to(torch.int32)


def act_order(bits: int, K: int, N: int, group: int) -> GPTQWeight:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(K))
    return GPTQWeight(
        config=GPTQConfig(bits, group, desc_act=True, zeros=Stored()),
        qweight=words(K * bits // 32, N),
        qzeros=words(K // group, N * bits // 32, seed=1),
        scales=(torch.rand(K // group, N) * 0.02).half(),
        g_idx=(torch.arange(K) // group)[order].to(torch.int32),
    ).to("cuda")
