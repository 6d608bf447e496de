"""Products with panels, by every instruction set that is here: the three checks, edges, threads, strides."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.kernel_formats import repack
from qload.kernels import cpu
from qload.spec import Weight
from qload.testing import (
    assert_reads_back,
    assert_same_bits,
    assert_same_twice,
    assert_sums_exactly,
    assert_within_bound,
)
from tests.kernel_formats.marlin_layers import layer
from tests.native.memory import ISAS

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
WEIGHTS = {
    "symmetric": layer(64, 32, 32),
    "zero points": layer(64, 32, 32, sym=False),
    "2 bits": layer(64, 32, 32, bits=2),
    "3 bits, zero points": layer(64, 32, 32, bits=3, sym=False),
    "8 bits": layer(64, 32, 32, bits=8, sym=False),
    "8 bits, symmetric, one group": layer(64, 32, -1, bits=8),
    "8 bits, groups of half pairs": layer(72, 24, 12, bits=8, act=True, sym=False),
    "8 bits, short group": layer(72, 40, 32, bits=8, scales=torch.float32),
    "act order": layer(64, 32, 16, act=True, sym=False),
    "odd sizes": layer(72, 24, 20, act=True, sym=False),
    "short group": layer(72, 40, 32, scales=torch.float32),
    "bfloat16 scales": layer(64, 32, 32, scales=torch.bfloat16),
    "long group": layer(160, 16, -1, sym=False),
}
EACH = pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 40)


@cache
def in_panels(weight: Weight) -> Any:
    """Once for all tests, which write to none."""
    return repack(weight, "panels")


def kernel(weight: Weight, isa: str, threads: int = 1, few: int | None = None) -> Any:
    """x -> y by the CPU module."""
    made = in_panels(weight)

    def multiply(x: Tensor) -> Tensor:
        with native.using(isa, threads):
            y = cpu.multiply(x, made, few=few)
        assert y is not None
        return y

    return multiply


def drawn(M: int, K: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(M, K, generator=torch.Generator().manual_seed(M)) / 8).to(dtype)


@ISAS
@FLOATS
@EACH
def test_the_weight_is_read_back(isa: str, dtype: torch.dtype, weight: Weight) -> None:
    few, many = kernel(weight, isa, few=6), kernel(weight, isa, few=0)

    assert_reads_back(many, weight, dtype)
    assert_reads_back(lambda x: torch.cat([few(some) for some in torch.split(x, 5)]), weight, dtype)


@ISAS
@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize("few", [0, 6], ids=["spelled out", "in registers"])
def test_small_integers_are_summed_exactly(isa: str, M: int, few: int) -> None:
    for weight in WEIGHTS.values():
        assert_sums_exactly(kernel(weight, isa, few=few), weight, torch.float32, M=M)


@ISAS
@FLOATS
@EACH
def test_random_numbers_are_as_close_as_rounding_allows(isa: str, dtype: torch.dtype, weight: Weight) -> None:
    for M in TOKENS:
        assert_within_bound(kernel(weight, isa), weight, drawn(M, weight.shape[1], dtype))


@ISAS
def test_threads_change_no_bit(isa: str) -> None:
    weight = layer(256, 1040, 32, sym=False)
    for M in (4, 40):  # each enough work for several threads
        x = drawn(M, 256)
        alone = kernel(weight, isa)(x)
        for threads in range(2, 9):
            assert_same_bits(kernel(weight, isa, threads)(x), alone)


@ISAS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("octaves", [0, 6, 10, 13, 14, 15])
@pytest.mark.parametrize("small", [-255 / 128, 255 / 128])
def test_small_inputs_count_beside_large_ones_of_their_group(
    isa: str, dtype: torch.dtype, octaves: int, small: float
) -> None:
    made = in_panels(WEIGHTS["symmetric"])
    words = made.qweight.clone()
    words.view(2, 8, 16)[:, 0] = words.view(2, 8, 16)[:, 0] & ~15 | 8  # the first row is 0
    weight = made.holding({"qweight": words})
    w = weight.dequantize().double()
    for at in range(1, 32):
        x = torch.zeros(1, 64, dtype=dtype)
        x[0, 0], x[0, at] = 2.0**octaves, small
        with native.using(isa):
            y = cpu.multiply(x, weight)
        assert y is not None
        assert_same_bits(y[0], (w[:, at] * small).to(dtype) + 0.0)


@ISAS
@FLOATS
@EACH
def test_one_token_of_any_magnitude(isa: str, dtype: torch.dtype, weight: Weight) -> None:
    K = weight.shape[1]
    for octaves in (1, 8) if dtype == torch.float16 else (1, 8, 20, 60, 120):
        x = drawn(1, K, dtype).double() * 2.0 ** (torch.arange(K) % octaves - octaves // 2)
        assert_within_bound(kernel(weight, isa), weight, x.to(dtype))


@ISAS
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [96, 384, -1])
def test_more_rows_and_panels_than_are_spelled_out_at_once(isa: str, bits: int, group: int) -> None:
    weight = layer(1152, 328, group, bits=bits, sym=False)
    made = in_panels(weight)
    whole = made.holding({"scales": torch.ones_like(made.scales)})
    for dtype, M in ((torch.bfloat16, 33), (torch.float16, 50)):
        x = torch.randint(-3, 4, (M, 1152), generator=torch.Generator().manual_seed(M)).to(dtype)
        want = (x.double() @ whole.dequantize().double().T).to(dtype)
        for threads in (1, 3):
            with native.using(isa, threads):
                y = cpu.multiply(x, whole)
            assert y is not None
            assert_same_bits(y, want)
        assert_within_bound(kernel(weight, isa), weight, drawn(M, 1152, dtype))


@ISAS
def test_every_element_is_written(isa: str) -> None:
    for weight in WEIGHTS.values():
        for M in (1, 5, 7):
            assert_same_twice(kernel(weight, isa), drawn(M, weight.shape[1]))


@ISAS
def test_more_tokens_than_lie_ready_at_once(isa: str) -> None:
    weight = WEIGHTS["odd sizes"]
    x = drawn(259, 72)
    y = kernel(weight, isa)(x)

    assert_same_bits(y[256:], kernel(weight, isa, few=0)(x[256:]))
    assert_within_bound(lambda x: y, weight, x)


@ISAS
@pytest.mark.parametrize("name", ["symmetric", "act order", "odd sizes"])
def test_inputs_lie_anywhere(isa: str, name: str) -> None:
    weight, multiply = WEIGHTS[name], kernel(WEIGHTS[name], isa)
    K = weight.shape[1]
    wide = drawn(6, 2 * K + 3)
    row_by_row, one, turned = wide[::2, 1 : K + 1], wide[:1, :K].expand(5, K), drawn(K, 6).T

    for x in (row_by_row, one, turned, wide[:, : 2 * K : 2]):
        assert_same_bits(multiply(x), multiply(x.clone(memory_format=torch.contiguous_format)))
    assert_same_bits(multiply(wide[:, :K].reshape(2, 3, K)), multiply(wide[:, :K]).reshape(2, 3, -1))


@ISAS
def test_a_token_that_is_not_finite_spoils_no_other(isa: str) -> None:
    weight = WEIGHTS["odd sizes"]
    for M in (3, 8):
        x = drawn(M, 72)
        want = kernel(weight, isa)(x)
        x[1, 5] = torch.nan
        y = kernel(weight, isa)(x)

        assert y[1].isnan().all()
        assert_same_bits(y[2:], want[2:])
        assert_same_bits(y[0], want[0])


@ISAS
@FLOATS
def test_what_is_too_large_for_a_type_is_infinite(isa: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS["symmetric"]
    y = kernel(weight, isa)(torch.full((2, 64), 60000.0).to(dtype))

    assert torch.isinf(y).any() == (dtype == torch.float16)
    assert not y.isnan().any()


@ISAS
def test_a_bias_is_added_before_the_only_rounding(isa: str) -> None:
    made = in_panels(WEIGHTS["odd sizes"])
    made = made.holding({"scales": torch.ones_like(made.scales)})  # whose sums are exact
    bias = torch.arange(24).double()
    for M in (1, 7):
        x = (16 * drawn(M, 72)).round().bfloat16()
        with native.using(isa):
            wide, y = cpu.multiply(x.float(), made), cpu.multiply(x, made, bias)
        assert wide is not None
        assert y is not None
        assert_same_bits(y, (wide + bias.float()).bfloat16())


@ISAS
@FLOATS
@pytest.mark.parametrize("most", [0, 16, 17, 255])
@pytest.mark.parametrize("name", ["zero points", "8 bits"])
def test_zero_points_of_any_byte(isa: str, dtype: torch.dtype, most: int, name: str) -> None:
    made = in_panels(WEIGHTS[name])
    zeros = made.zeros.clone()
    zeros[1, 16:] = most
    weight = made.holding({"zeros": zeros})

    def multiply(x: Tensor) -> Tensor:
        y = cpu.multiply(x, weight)
        assert y is not None
        return y

    with native.using(isa):
        assert_reads_back(multiply, weight, dtype)
        for M in (1, 2, 7):
            assert_within_bound(multiply, weight, drawn(M, 64, dtype))


@ISAS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("M", [1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17, 35])
def test_halves_of_any_number_of_tokens_are_summed_exactly(isa: str, dtype: torch.dtype, M: int) -> None:
    for weight in WEIGHTS.values():
        made = in_panels(weight)
        whole = made.holding({"scales": torch.ones_like(made.scales)})
        x = torch.randint(-9, 10, (M, weight.shape[1]), generator=torch.Generator().manual_seed(M)).to(dtype)
        with native.using(isa):
            y = cpu.multiply(x, whole)
        assert y is not None
        assert_same_bits(y, (x.double() @ whole.dequantize().double().T).to(dtype))


@ISAS
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["symmetric", "8 bits"])
def test_halves_that_are_not_finite_are_what_they_are(isa: str, value: float, name: str) -> None:
    weight = WEIGHTS[name]
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.zeros(2, 64, dtype=dtype)
        x[1, 9] = value
        y = kernel(weight, isa)(x)
        assert_same_bits(y[0], torch.zeros(32, dtype=dtype))
        assert_same_bits(y[1].isnan(), (value * weight.dequantize()[:, 9]).isnan())
        assert_same_bits(y[1].isinf(), (value * weight.dequantize()[:, 9]).isinf())


@ISAS
@pytest.mark.parametrize("name", ["symmetric", "8 bits, symmetric, one group"])
def test_the_smallest_halves_count(isa: str, name: str) -> None:
    weight = WEIGHTS[name]
    smallest = torch.tensor(2.0**-24)
    x = torch.eye(64).mul(smallest).half()

    y = kernel(weight, isa)(torch.cat([x * 1024, x]))

    assert_same_bits(y, torch.cat([x * 1024, x]).double().matmul(weight.dequantize().double().T).half())


@ISAS
def test_a_permutation_that_leaves_the_inputs_reads_nothing(isa: str) -> None:
    made: Any = repack(WEIGHTS["act order"], "panels")
    made.perm[3] = 64
    with native.using(isa), pytest.raises(ValueError, match="a permutation leaves the inputs"):
        cpu.multiply(drawn(1, 64), made)
