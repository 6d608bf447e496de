"""GPTQ in panels: equal values, also by an emulator, restored bit for bit, or refused with a reason."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from qload.errors import RepackError
from qload.kernel_formats import PanelsWeight, repack, restore
from qload.layouts import StoredMinusOneUnmasked, gptq
from qload.testing import assert_same_bits, emulators
from tests.kernel_formats.marlin_layers import layer, row_share

pytestmark = pytest.mark.usefixtures("seen_texts")

CASES = [
    pytest.param({"K": 64, "N": 32, "group": 32}, id="symmetric"),
    pytest.param({"K": 64, "N": 32, "group": 32, "sym": False}, id="zero points"),
    pytest.param({"K": 64, "N": 32, "group": -1, "bits": 8, "sym": False}, id="8 bits, one group"),
    pytest.param({"K": 64, "N": 32, "group": 16, "act": True, "sym": False}, id="act order"),
    pytest.param({"K": 72, "N": 24, "group": 32}, id="a short group and half a panel"),
    pytest.param({"K": 64, "N": 16, "group": 20, "sym": False}, id="groups that fill no words"),
    pytest.param({"K": 64, "N": 24, "group": 20, "act": True, "sym": False}, id="all of it, permuted"),
    pytest.param({"K": 64, "N": 24, "group": 6, "bits": 8, "act": True, "sym": False}, id="and of 8 bits"),
    pytest.param({"K": 64, "N": 32, "group": 32, "bits": 3}, id="3 bits"),
    pytest.param({"K": 64, "N": 64, "group": 32, "bits": 2, "sym": False}, id="2 bits, zero points"),
    pytest.param({"K": 96, "N": 32, "group": -1, "bits": 2}, id="2 bits, one group"),
    pytest.param(
        {"K": 64, "N": 32, "group": 20, "bits": 3, "act": True, "sym": False}, id="3 bits, permuted"
    ),
    pytest.param({"K": 64, "N": 32, "group": 32, "scales": torch.bfloat16}, id="bfloat16"),
    pytest.param({"K": 64, "N": 32, "group": 32, "scales": torch.float32}, id="float32"),
]


@pytest.mark.parametrize("case", CASES)
def test_a_weight_in_panels_has_equal_values_and_is_restored(case: dict[str, Any]) -> None:
    weight = layer(**case)
    packed: Any = repack(weight, "panels")

    read = emulators.panels_weight(
        **packed.fields(),
        bits=packed.config.stored_bits,
        group_size=packed.config.group_size,
        K=weight.layer.K,
        zero=packed.config.default_zero,
    )

    assert type(packed) is PanelsWeight
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_bits(read[:, : weight.layer.N].contiguous(), weight.dequantize().T.contiguous())
    restored = restore(packed)
    assert (type(restored), restored.config) == (type(weight), weight.config)
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name], tensor)


def test_an_unpadded_weight_is_built_from_its_tensors() -> None:
    packed: Any = repack(layer(64, 32, 32, act=True, sym=False), "panels")

    again = PanelsWeight(**packed.fields(), config=packed.config)

    assert again.layer.whole == (32, 64)
    assert_same_bits(again.dequantize(), packed.dequantize())


def test_symmetric_zero_points_are_left_out() -> None:
    assert repack(layer(64, 32, 32), "panels").fields().keys() == {"qweight", "scales"}


def test_two_and_three_bits_are_stored_as_four() -> None:
    for bits, row in ((2, 0x32103210), (3, 0x76543210)):
        weight = layer(64, 32, 32, bits=bits)
        codes = torch.arange(64)[:, None].expand(64, 32) % 2**bits
        weight.qweight.copy_(gptq.rows(bits).pack(codes.contiguous()))

        packed: Any = repack(weight, "panels")

        assert packed.qweight.unique().tolist() == [row]
        assert (packed.zeros, packed.config.default_zero) == (None, 2 ** (bits - 1))
        assert (packed.config.bits, packed.config.stored_bits, packed.padded_shape) == (bits, 4, (32, 64))


def test_a_zero_point_of_256_is_refused() -> None:
    stored = layer(64, 32, 32, bits=8)
    weight = replace(stored, config=replace(stored.config, zeros=StoredMinusOneUnmasked()))
    weight.qzeros[0, 0] = -1  # each byte 255, stored minus one

    with pytest.raises(RepackError, match="a zero point of 256 does not fit a byte"):
        repack(weight, "panels")


def test_a_share_of_an_act_order_is_refused() -> None:
    share = row_share(layer(128, 32, 32, act=True), 0, 2)

    with pytest.raises(RepackError, match=r"rows of its groups are on other ranks \(act order\)"):
        repack(share, "panels")


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_that_are_not_of_one_size_are_refused(bits: int) -> None:
    weight = layer(64, 32, 32, bits=bits, act=True)
    weight.g_idx[weight.g_idx == 1] = torch.tensor([0] + 31 * [1], dtype=torch.int32)

    with pytest.raises(RepackError, match=r"its groups are not of one size \(act order\)"):
        repack(weight, "panels")
