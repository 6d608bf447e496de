"""Integers of 2 and 3 bits in strips of 4: values, codes by hand, and the checkpoint bit for bit."""

from typing import Any

import pytest
import torch

from qload.formats import GPTQWeight
from qload.kernel_formats import StripsWeight, repack, restore
from qload.layouts import STORED_MINUS_ONE, Stored, ZeroPoints, strips
from qload.testing import assert_same_bits
from tests.kernels.mp_layers import Case

BITS = pytest.mark.parametrize("bits", [2, 3])


def pack(weight: GPTQWeight, **options: Any) -> StripsWeight:
    packed = repack(weight, "strips", **options)
    assert isinstance(packed, StripsWeight)
    return packed


@BITS
@pytest.mark.parametrize(
    "zeros", [None, Stored(), STORED_MINUS_ONE], ids=["symmetric", "stored", "minus one"]
)
@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act order"])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_values_are_the_same_and_the_checkpoint_comes_back_bit_for_bit(
    bits: int, zeros: ZeroPoints | None, act_order: bool, group: int
) -> None:
    weight = Case(bits=bits, group=group, zeros=zeros, act_order=act_order, N=96, K=512).weight()

    packed = pack(weight)
    restored = restore(packed)

    assert (packed.config.bits, packed.config.zero_point) == (4, zeros is not None)
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert (type(restored), restored.config, restored.layer) == (GPTQWeight, weight.config, weight.layer)
    assert restored.fields().keys() == weight.fields().keys()
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name], tensor)


@BITS
def test_codes_lie_around_8_as_in_the_checkpoint_around_their_middle(bits: int) -> None:
    weight = Case(bits=bits, group=128, N=64, K=128).weight()

    codes = strips.rows(4).unpack(pack(weight).qweight)

    middle = 2 ** (bits - 1)
    assert torch.equal(codes - 8, weight.codes().plain().T.int() - middle)
    assert (int(codes.min()), int(codes.max())) == (8 - middle, 7 + middle)


@BITS
def test_a_repacked_layer_is_repacked_again_with_its_own_bits(bits: int) -> None:
    weight = Case(bits=bits, group=64).weight()

    again = repack(pack(weight), "exllama")

    assert again.config.bits == bits  # type: ignore[attr-defined]
    assert_same_bits(again.dequantize(), weight.dequantize())


@BITS
def test_a_weight_is_written_into_another_of_its_kind(bits: int) -> None:
    first, second = (Case(bits=bits, group=64, seed=seed).weight() for seed in (0, 1))
    out = pack(first)

    written = pack(second, out=out)

    assert written.qweight is out.qweight
    assert_same_bits(written.dequantize(), second.dequantize())
