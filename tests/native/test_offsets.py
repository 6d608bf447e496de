"""Products with panels with offsets, and with codes of 5 and 6 bits, for every available instruction set."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.formats import MLXConfig, MLXWeight
from qload.kernel_formats import panels, repack
from qload.kernels import cpu
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.kernel_formats.offset_layers import ALL, drawn
from tests.native.memory import ISAS

CODED = (
    "mlx 3 bits",
    "mlx 6 bits",
    "mlx 8 bits",
    "mlx float16",
    "torchao int4",
    "quanto 2 bits",
    "hqq 5 bits",
)
NOISY = ("mlx 4 bits", "quanto 4 bits", "hqq 3 bits", "torchao_intx 5 bits", "Q2_K", "Q4_K", "Q6_K")
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@cache
def in_panels(name: str, filling: str = "noise", N: int = 40, K: int = 256) -> Any:
    """Return a drawn weight in panels; tests share it and do not write to it."""
    return repack(drawn(ALL[name], N, K, filling), "panels")


def kernel(weight: Any, isa: str, threads: int = 1, few: int | None = None) -> Any:
    """x -> y by the CPU module."""

    def multiply(x: Tensor) -> Tensor:
        with native.using(isa, threads):
            y = cpu.multiply(x, weight, few=few)
        assert y is not None
        return y

    return multiply


def inputs(M: int, K: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(M, K, generator=torch.Generator().manual_seed(M)) / 8 + 0.25).to(dtype)


@ISAS
@FLOATS
def test_small_numbers_are_read_back_and_summed_exactly(isa: str, dtype: torch.dtype) -> None:
    for name in CODED:
        weight = in_panels(name, "coded", N=24, K=192)
        x = torch.randint(-3, 4, (7, 192), generator=torch.Generator().manual_seed(0)).to(dtype)
        want = (x.double() @ weight.dequantize().double().T).to(dtype)
        for few in (0, 6):
            assert torch.equal(kernel(weight, isa, few=few)(x[:5]), want[:5])
        assert torch.equal(kernel(weight, isa)(x), want)
        if dtype != torch.float16:
            assert_reads_back(kernel(weight, isa), weight, dtype)


@ISAS
@FLOATS
def test_random_numbers_are_as_close_as_rounding_allows(isa: str, dtype: torch.dtype) -> None:
    for name in NOISY:
        weight = in_panels(name, N=24)
        for M in (1, 6, 20):
            assert_within_bound(kernel(weight, isa), weight, inputs(M, 256, dtype))


@ISAS
@pytest.mark.parametrize("name", ["mlx 4 bits", "Q2_K"])
def test_many_groups_panels_and_tokens(isa: str, name: str) -> None:
    weight = in_panels(name, N=72, K=2304)
    for M in (1, 2, 35):
        x = inputs(M, 2304, torch.bfloat16)
        alone = kernel(weight, isa)(x)
        assert_within_bound(lambda _, y=alone: y, weight, x)
        assert_same_bits(kernel(weight, isa, threads=3)(x), alone)


@ISAS
def test_more_tokens_than_lie_ready_at_once(isa: str) -> None:
    weight = in_panels("mlx 4 bits", N=16, K=64)
    for dtype in (torch.float32, torch.bfloat16):
        assert_within_bound(kernel(weight, isa), weight, inputs(259, 64, dtype))


@ISAS
def test_a_token_that_is_not_finite_spoils_no_other(isa: str) -> None:
    weight = in_panels("mlx 4 bits")
    for M in (3, 8):
        x = inputs(M, 256)
        want = kernel(weight, isa)(x)
        x[1, 5] = torch.nan
        y = kernel(weight, isa)(x)

        assert y[1].isnan().all()
        assert_same_bits(y[[0, *range(2, M)]], want[[0, *range(2, M)]])


@ISAS
def test_padded_groups_in_act_order(isa: str) -> None:
    """Groups of 20 inputs take 24 rows, in the order of a permutation."""
    integers = drawn((MLXWeight, MLXConfig(4, 20), torch.float32), 40, 160, "coded").to_integers()
    shuffled = integers.g_idx[torch.randperm(160, generator=torch.Generator().manual_seed(1))]
    weight = panels.from_integers(replace(integers, g_idx=shuffled))
    codes, (scales, offsets) = integers.unpack(), (integers.scales, integers.offsets)
    want = scales[shuffled] * (codes if isinstance(codes, Tensor) else codes.plain()) - offsets[shuffled]

    assert_same_bits(weight.dequantize(), want.T.contiguous())
    for dtype in (torch.float32, torch.bfloat16):
        assert_reads_back(kernel(weight, isa), weight, dtype)
        for M in (1, 7):
            assert_sums_exactly(kernel(weight, isa), weight, dtype, M=M)
