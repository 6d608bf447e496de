"""Many tokens of bfloat16 with rows of codes: exact where sums are, whatever is spelled out at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.formats import BNB4Config, BNBNF4Weight, Fp8Config, Fp8Weight
from qload.kernels import cpu
from qload.kernels.cpu import CACHE, CodeRows
from qload.layouts.bnb import TABLES
from qload.spec import Weight
from qload.testing import assert_same_bits, assert_within_bound
from tests.native.memory import ISAS
from tests.native.test_few_rows import KINDS, dense, drawn, multiply
from tests.native.test_row_products import mxfp4

TOKENS = (17, 22, 32, 33, 64, 65, 131, 258)


def fp8(N: int, K: int) -> Weight:
    numbers = torch.randn(N, K, generator=torch.Generator().manual_seed(N + K))
    scales = 2.0 ** (torch.arange(N) % 5).float()[:, None]
    return Fp8Weight(config=Fp8Config("channel"), weight=numbers.to(torch.float8_e4m3fn), weight_scale=scales)


def nf4(N: int, K: int) -> Weight:
    make = torch.Generator().manual_seed(N + K)
    codes = torch.randint(0, 256, (N * K // 2, 1), generator=make, dtype=torch.uint8)
    scales = torch.rand(N * K // 64, generator=make)
    return BNBNF4Weight(BNB4Config("nf4", K=K), codes, scales, torch.tensor(TABLES["nf4"]))


WHOLE = {
    "mxfp4": mxfp4(85, 1088),
    "fp8": fp8(85, 1030),
    "few outputs": fp8(5, 48),
    "more outputs than share inputs": mxfp4(150, 544),
}
EACH = pytest.mark.parametrize("weight", WHOLE.values(), ids=WHOLE)


def kernel(weight: Weight, isa: str, threads: int = 1) -> Any:
    def multiply(x: Tensor) -> Tensor:
        with native.using(isa, threads):
            plan = cpu.plan_of(weight)
            assert plan is not None
            y = plan.product(CACHE, x)
        assert y is not None
        return y

    return multiply


def whole(M: int, K: int) -> Tensor:
    return torch.randint(-2, 3, (M, K), generator=torch.Generator().manual_seed(M)).bfloat16()


@ISAS
@EACH
@pytest.mark.parametrize("M", TOKENS)
def test_whole_numbers_are_summed_exactly(isa: str, weight: Weight, M: int) -> None:
    x = whole(M, weight.shape[1])
    want = (x.double() @ weight.dequantize().double().T).bfloat16()

    for threads in (1, 3):
        assert_same_bits(kernel(weight, isa, threads)(x), want)


@ISAS
@EACH
def test_rows_of_inputs_lie_apart(isa: str, weight: Weight) -> None:
    K = weight.shape[1]
    for M in (20, 70):
        wide = whole(M, 2 * K + 1)
        x = wide[:, 1 : K + 1]
        assert_same_bits(kernel(weight, isa)(x), kernel(weight, isa)(x.contiguous()))


@ISAS
@EACH
@pytest.mark.parametrize("M", [20, 70])
def test_a_token_that_is_not_finite_spoils_no_other(isa: str, weight: Weight, M: int) -> None:
    x = whole(M, weight.shape[1])
    want = kernel(weight, isa)(x)
    x[7, -1], x[9, 0] = torch.nan, torch.inf

    y = kernel(weight, isa)(x)

    assert y[7].isnan().all()
    assert not y[9].isfinite().any()
    others = [token for token in range(M) if token not in (7, 9)]
    assert_same_bits(y[others], want[others])


@ISAS
@pytest.mark.parametrize("M", [20, 40])
def test_values_that_are_no_bfloat16_are_rounded_at_most_once(isa: str, M: int) -> None:
    weight = nf4(48, 1088)
    x = torch.randn(M, 1088, generator=torch.Generator().manual_seed(M)).bfloat16()

    assert_within_bound(kernel(weight, isa), weight, x)
    one = torch.eye(1088, dtype=torch.bfloat16)[:M]
    assert_same_bits(kernel(weight, isa)(one), weight.dequantize()[:, :M].T.bfloat16().contiguous())


@ISAS
@pytest.mark.parametrize("M", [20, 70])
def test_a_weight_that_is_not_finite_spoils_no_other_output(isa: str, M: int) -> None:
    weight: Any = fp8(85, 1030)
    spoiled = [51]  # which is spelled out where output 3 goes on after it
    codes = weight.weight.clone()
    codes.view(torch.uint8)[spoiled, 10] = 0x7F
    x = whole(M, 1030)

    y = kernel(weight.holding({"weight": codes}), isa)(x)

    others = [output for output in range(85) if output not in spoiled]
    assert y[:, spoiled].isnan().all()
    assert_same_bits(y[:, others], kernel(weight, isa)(x)[:, others])


@ISAS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("run", "K"), [(8, 72), (16, 560), (48, 624), (64, 1090), (192, 1100), (1090, 1090)])
def test_runs_of_any_length_are_read_back(isa: str, kind: str, run: int, K: int) -> None:
    some = torch.arange(0, K, max(1, K // 19))[:17]
    x = torch.eye(K)[some].bfloat16()
    for zeros, divide, factor in (
        (False, False, 1.0),
        (True, False, 0.3),
        (False, True, 0.3),
        (True, True, 1.0),
    ):
        rows = drawn(kind, 37, K, run, zeros, divide, factor)
        turned = CodeRows(rows.bytes, rows.bits, rows.bits == 4, rows.meaning)

        for each in (rows, turned):
            want = dense(each, K)[:, some].T + 0.0
            assert_same_bits(multiply(x, each, isa), want.bfloat16())
