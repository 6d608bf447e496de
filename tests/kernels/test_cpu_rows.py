"""Rows of codes as the CPU module is told of them, and what is kept of them between calls."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qload.formats import (
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    CTIntWeight,
    CTMXFP4Weight,
    EETQWeight,
    Fp8Config,
    Fp8Weight,
)
from qload.kernels import cpu
from qload.spec import Weight
from qload.testing import assert_same_bits, layers
from tests.format_cases import CONFIGS
from tests.kernels.rows_by_hand import by_hand
from tests.kernels.ways_by_hand import Write, write_ways

__all__ = ["by_hand", "write_ways"]  # fixtures

TYPES = (BNBNF4Weight, BNBFP4Weight, BNBWeight, CTIntWeight, CTMXFP4Weight, EETQWeight, Fp8Weight)
every_type = pytest.mark.parametrize("weight_type", TYPES, ids=lambda weight_type: weight_type.format)
some_layers = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


def fp8(**tensors: Tensor) -> Fp8Weight:
    held = {"weight": torch.ones(32, 64).to(torch.float8_e4m3fn), "weight_scale": torch.ones(32), **tensors}
    return Fp8Weight(config=Fp8Config(per="channel"), **held)


@every_type
@given(data=st.data())
@some_layers
def test_rows_are_read_as_what_they_mean(by_hand: list[int], weight_type: type[Weight], data: Any) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], most=2)).weight()
    x, bias = torch.eye(weight.layer.K), torch.arange(weight.layer.N).float()
    want = weight.dequantize().T + 0.0  # sums of zeros have no sign

    assert_same_bits(cpu.multiply(x, weight), want)
    assert_same_bits(cpu.multiply(x[:1], weight, bias), want[:1] + bias)
    assert by_hand[-2:] == [len(x), 2 if weight_type is EETQWeight else 1]  # whose outputs lie in pairs


@pytest.mark.parametrize("weight_type", [BNBWeight, CTIntWeight, EETQWeight], ids=lambda each: each.format)
@given(data=st.data())
@some_layers
@pytest.mark.usefixtures("by_hand")
def test_every_byte_is_a_number_with_its_sign(weight_type: type[Weight], data: Any) -> None:
    drawn = data.draw(layers(weight_type, CONFIGS[weight_type], most=2)).weight()
    name = next(n for n, each in drawn.fields().items() if each.dtype == torch.int8 and each.ndim == 2)
    bytes_ = torch.arange(-128, 128).repeat(drawn.fields()[name].numel() // 256 + 1)
    shape = drawn.fields()[name].shape
    weight = drawn.holding({name: bytes_[: shape.numel()].to(torch.int8).view(shape)})

    assert_same_bits(cpu.multiply(torch.eye(weight.layer.K), weight), weight.dequantize().T + 0.0)


@every_type
@given(data=st.data())
@some_layers
@pytest.mark.usefixtures("by_hand")
def test_inputs_are_read_wherever_they_lie(weight_type: type[Weight], data: Any) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], most=2)).weight()
    last = torch.eye(weight.layer.K)[-3:]
    want = weight.dequantize().T[-3:] + 0.0

    for x in (last.T.contiguous().T, torch.cat([last, last], 1)[:, : weight.layer.K]):
        assert_same_bits(cpu.multiply(x, weight), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_layer_asks_for_few_tokens_of_bfloat16_where_torch_is_fast(
    by_hand: list[int], dtype: torch.dtype, write_ways: Write
) -> None:
    write_ways({("rows", 8, "bfloat16", "avx2"): [(16, ("cache", "torch")), (64, ("torch", "cache"))]})
    most, linear = 16, fp8().get_linear()

    for tokens in (1, most, most + 1):
        linear(torch.ones(tokens, 64, dtype=dtype))

    assert by_hand == [1, most, most + 1][: 2 if dtype == torch.bfloat16 else 3]


def test_scales_that_lie_between_rows_of_codes_are_none_of_them(by_hand: list[int]) -> None:
    each = torch.zeros(32, 17)
    codes, scales = each.view(torch.uint8)[:, :64].view(torch.float8_e4m3fn), each[:, 16]
    codes.fill_(1)
    scales.fill_(1)
    linear, x = fp8(weight=codes, weight_scale=scales).get_linear(), torch.ones(2, 64)
    before = linear(x)

    scales.fill_(2)

    assert_same_bits(linear(x), 2 * before)
    assert by_hand == [2, 2]


@pytest.mark.usefixtures("by_hand")
def test_a_layer_that_was_moved_keeps_no_memory_where_it_was() -> None:
    linear = fp8().get_linear()
    linear(torch.ones(2, 64))
    assert linear._call._kept._kept is not None
    codes = weakref.ref(linear.weight.untyped_storage())

    linear.to("meta")

    assert codes() is None
