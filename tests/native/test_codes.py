"""Sums of products of int8, by every instruction set that is here, and layers that declare such inputs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.kernels import bounds, plans, scaled
from qload.kernels.cpu import sums_of_codes
from qload.native import load
from qload.testing import assert_same_bits
from tests.kernels.activation_cases import named
from tests.kernels.test_scaled import TOKEN, int8
from tests.native.memory import ISAS

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
SIZES = [(1, 1, 1), (2, 5, 15), (3, 4, 16), (4, 3, 31), (5, 17, 64), (9, 8, 65), (1, 6, 127), (7, 9, 1030)]


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def sums(isa: str, x: Tensor, codes: Tensor, threads: int = 1) -> Tensor:
    with native.using(isa, threads):
        y = sums_of_codes(x, codes)
    assert y is not None
    return y


def exactly(x: Tensor, codes: Tensor) -> Tensor:
    return x.long() @ codes.long().T


@ISAS
@pytest.mark.parametrize(("M", "N", "K"), SIZES)
def test_sums_are_exact(isa: str, M: int, N: int, K: int) -> None:
    x, codes = drawn(M, K), drawn(N, K)

    assert_same_bits(sums(isa, x, codes).long(), exactly(x, codes))


@ISAS
@pytest.mark.parametrize(("one", "other"), [(-128, -128), (-128, 127), (127, -128), (127, 127)])
def test_the_largest_sums_fit(isa: str, one: int, other: int) -> None:
    x, codes = (torch.full((2, 65535), value, dtype=torch.int8) for value in (one, other))

    assert set(sums(isa, x, codes).flatten().tolist()) == {65535 * one * other}


@ISAS
def test_rows_lie_anywhere(isa: str) -> None:
    wide = drawn(14, 300)
    x, codes = wide[::3, 5:205], wide[1::2, 7:207]
    assert codes.stride() == (600, 1)

    assert_same_bits(sums(isa, x, codes).long(), exactly(x, codes))


@ISAS
def test_threads_change_no_bit_and_every_sum_is_written(isa: str) -> None:
    x, codes = drawn(5, 1000), drawn(1003, 1000)
    alone = sums(isa, x, codes)

    for threads in (2, 3):
        assert_same_bits(sums(isa, x, codes, threads), alone)
    module: Any = load("cpu").found
    for value in (0, -1):
        held = torch.full((5, 1003), value, dtype=torch.int32)
        module.multiply_codes(isa, (5, 1000, 1003), x.data_ptr(), codes.data_ptr(), 1000, held.data_ptr(), 1)
        assert_same_bits(held, alone)


def test_what_is_not_taken() -> None:
    x, codes = drawn(2, 64), drawn(3, 64)

    assert sums_of_codes(x.int(), codes) is None
    assert sums_of_codes(x, codes.T.contiguous().T) is None
    assert sums_of_codes(x[:, :0], codes[:, :0]) is None
    assert (
        sums_of_codes(torch.zeros(1, 65536, dtype=torch.int8), torch.zeros(1, 65536, dtype=torch.int8))
        is None
    )
    with native.reference():
        assert sums_of_codes(x, codes) is None
    module: Any = load("cpu").found
    with pytest.raises(ValueError, match="an int32 does not hold sums of so many codes"):
        module.multiply_codes("scalar", (1, 65536, 1), x.data_ptr(), codes.data_ptr(), 64, x.data_ptr(), 1)


@ISAS
@DTYPES
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("M", [1, 4, 33])
def test_layers_that_declare_int8_inputs_are_within_their_bound(
    isa: str, dtype: torch.dtype, symmetric: bool, M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = int8(37, 130, replace(TOKEN, symmetric=symmetric))
    x = (torch.randn(M, 130, generator=torch.Generator().manual_seed(M)) + symmetric).to(dtype)
    monkeypatch.setattr(scaled, "_codes_times_codes", None)  # in float32

    with native.using(isa):
        y = plans.multiply(x, weight, torch.ones(37))

    assert bool((bounds.excess(y, bounds.of_linear(x, weight, torch.ones(37))) <= 1).all())


@ISAS
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_spoils_no_other_and_is_not_lost(
    isa: str, symmetric: bool, value: float
) -> None:
    weight = int8(20, 64, replace(TOKEN, symmetric=symmetric))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    with native.using(isa):
        want = plans.multiply(x, weight)
        x[2, 7] = value
        y = plans.multiply(x, weight)

    assert y[2].isnan().all()
    others = torch.tensor([0, 1, 3, 4])
    assert_same_bits(y[others], want[others])


@ISAS
def test_nan_is_not_lost_where_the_scale_of_inputs_is_stored(isa: str) -> None:
    case = named("w8a8_int8_tensor_static_asym")
    x = case.x.reshape(-1, case.weight.layer.K).clone()
    with native.using(isa):
        want = plans.multiply(x, case.weight)
        x[0, 3] = torch.nan
        y = plans.multiply(x, case.weight)

    assert y[0].isnan().all()
    assert_same_bits(y[1:], want[1:])
