"""Integers with float offsets, or of 5 or 6 bits, in strips: equal values, restored, or refused."""

from typing import Any

import pytest
import torch

from qload import dtypes
from qload.errors import ArgumentError, RepackError
from qload.formats import QuantoConfig, QuantoWeight
from qload.kernel_formats import StripsWeight, repack, restore, strips
from qload.kernel_formats.strips import StripsConfig
from qload.testing import assert_same_bits
from tests.kernel_formats.offset_layers import ALL, CASES, FP16, drawn

pytestmark = pytest.mark.usefixtures("seen_texts")
FINE_GROUPS = ["Q2_K", "Q3_K", "Q6_K"]
ONE_WIDE_GROUP = ["quanto 4 bits, one group", "hqq float32"]
HELD = [name for name in ALL if name not in (*FINE_GROUPS, *ONE_WIDE_GROUP)]


@pytest.mark.parametrize("name", HELD)
def test_a_weight_in_strips_has_equal_values_and_is_restored(name: str) -> None:
    weight = drawn(ALL[name])
    packed: Any = repack(weight, "strips")

    assert type(packed) is StripsWeight
    assert_same_bits(packed.dequantize(), weight.dequantize())
    restored = restore(packed)
    assert (type(restored), restored.config) == (type(weight), weight.config)
    assert restored.fields().keys() == weight.fields().keys()
    for field, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[field].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "fields", "zero"),
    [
        ("mlx 2 bits", {"qweight", "scales", "offsets"}, 0),
        ("mlx 5 bits", {"qweight", "scales", "offsets"}, 0),
        ("torchao int4", {"qweight", "scales", "offsets"}, 8),
        ("Q4_1", {"qweight", "scales", "offsets"}, 0),
        ("Q5_0", {"qweight", "scales"}, 0),
        ("Q4_K", {"qweight", "scales", "offsets", "header"}, 0),
    ],
)
def test_one_zero_point_of_all_codes_is_in_the_config(name: str, fields: set[str], zero: int) -> None:
    packed: Any = repack(drawn(ALL[name]), "strips")

    assert packed.fields().keys() == fields
    assert packed.config.zero == zero


def test_float_zero_points_are_stored_as_products() -> None:
    packed: Any = repack(drawn(ALL["hqq 4 bits"]), "strips")

    assert (packed.scales.dtype, packed.offsets.dtype) == (torch.float32, torch.float32)
    assert (packed.config.offset, packed.config.dtype) == ("code", dtypes.float16)


def test_a_float_zero_point_of_a_scale_of_0_is_refused() -> None:
    weight = drawn(ALL["hqq 4 bits"])
    weight.scale[3] = 0

    with pytest.raises(RepackError, match="do not determine the zero points"):
        repack(weight, "strips")


def test_a_group_of_96_inputs_is_stored_as_three() -> None:
    weight = drawn((QuantoWeight, QuantoConfig(4, 96), FP16), K=192)
    packed: Any = repack(weight, "strips")

    assert (packed.config.group_size, packed.config.copies) == (32, 3)
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_bits(restore(packed).fields()["weight_shift"], weight.weight_shift)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "reads groups of 32, 64, 128") for name in FINE_GROUPS),
        *((name, "float32 scales of several groups, got one") for name in ONE_WIDE_GROUP),
    ],
)
def test_what_strips_cannot_represent_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(RepackError, match=reason):
        repack(drawn(ALL[name]), "strips")


def test_integer_zero_points_that_differ_are_refused_beside_offsets() -> None:

    integers = drawn(CASES["mlx 4 bits"]).to_integers()
    integers.zeros[0, 0] = 3

    with pytest.raises(RepackError, match="one zero point beside offsets, got 0 to 3"):
        strips.from_integers(integers)


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"zero_point": True, "offset": "weight"}, "zero_point"),
        ({"zero": 16}, "zero"),
        ({"zero": -1}, "zero"),
    ],
)
def test_a_config_that_no_weight_has_is_refused(settings: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError, match=f"strips: {argument}"):
        StripsConfig(4, 64, **settings)
