"""The linear on ExLlama's order: read-back, exact sums, a derived bound."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from qload.kernels.cuda import exllama
from qload.testing import assert_reads_back, assert_sums_exactly, assert_within_bound
from tests.gpu.exllama_layers import BITS, KINDS, TOKENS, Kind, call, kernel, layer
from tests.gpu.layers import DTYPES, inputs

pytestmark = pytest.mark.gpu


@DTYPES
@BITS
@KINDS
def test_one_input_at_a_time_reads_the_weight_back(kind: Kind, bits: int, dtype: torch.dtype) -> None:
    weight = layer(**kind, bits=bits, dtype=dtype)

    def in_pieces(x: Tensor) -> Tensor:  # the kernel of eight tokens, then that of sixteen
        return torch.cat([kernel(weight)(each) for each in (*x[:64].split(8), *x[64:].split(48))])

    assert_reads_back(in_pieces, weight, dtype)


@DTYPES
@BITS
@TOKENS
@KINDS
def test_sums_are_exact_where_they_can_be(kind: Kind, M: int, bits: int, dtype: torch.dtype) -> None:
    weight = layer(**kind, bits=bits, dtype=dtype, exact=True)

    assert_sums_exactly(kernel(weight), weight, dtype, M=M)


@DTYPES
@BITS
@TOKENS
@KINDS
def test_sums_are_within_what_rounding_costs(kind: Kind, M: int, bits: int, dtype: torch.dtype) -> None:
    weight = layer(**kind, bits=bits, dtype=dtype)

    assert_within_bound(kernel(weight), weight, inputs(M, weight, dtype))


@pytest.mark.parametrize(
    ("K", "N", "bits"), [(40, 8, 4), (36, 4, 8), (1004, 68, 8), (48, 16, 2), (1016, 72, 4)]
)
@pytest.mark.parametrize("M", [1, 16])
def test_words_that_end_within_a_step_are_the_last(K: int, N: int, bits: int, M: int) -> None:
    weight = layer(K, N, 32, bits, exact=True)

    assert_reads_back(kernel(weight), weight, torch.float16)
    assert_sums_exactly(kernel(weight), weight, torch.float16, M=M)


@BITS
@pytest.mark.parametrize("M", [3, 9])
def test_groups_may_have_any_rows_in_any_order(bits: int, M: int) -> None:
    even = layer(1056, 160, 48, bits, exact=True)
    g_idx = torch.randint(22, (1056,), device="cuda", dtype=torch.int32)
    weight = replace(even, g_idx=g_idx, config=replace(even.config, run=0))  # which is looked at, not counted

    assert_reads_back(kernel(weight), weight, torch.float16)
    assert_sums_exactly(kernel(weight), weight, torch.float16, M=M)


@BITS
@pytest.mark.parametrize("M", [1, 16, 65])
def test_the_largest_activations_do_not_overflow(bits: int, M: int) -> None:
    weight = layer(1056, 160, 48, bits, unit=2.0**-12)
    signs = inputs(M, weight, torch.float16).sign()

    assert_within_bound(kernel(weight), weight, signs * torch.finfo(torch.float16).max)


@pytest.mark.parametrize(("columns", "split"), [*product((1, 2, 3, 7, 8), (1, 2, 4, 8)), (12, 1)])
@pytest.mark.parametrize("M", [5, 16, 21])
def test_every_division_of_a_layer_sums_exactly(columns: int, split: int, M: int) -> None:
    if split > 1 and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs clusters")
    weight = layer(2080, 608, 128, exact=True)

    assert_sums_exactly(
        lambda x: exllama.multiply_few(call(x, weight), columns, split), weight, torch.float16, M=M
    )
