"""Integers with float offsets, or of 5 or 6 bits, in panels: equal values, restored, or refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from qload.errors import RepackError
from qload.formats import HQQConfig, HQQWeight, MLXConfig, MLXWeight, QuantoConfig, QuantoWeight
from qload.kernel_formats import PanelsWeight, repack, restore
from qload.spec import Weight
from qload.testing import assert_same_bits, assert_within_bound, emulators
from tests.kernel_formats.offset_layers import ALL, BF16, CASES, FP16, FP32, Case, drawn

pytestmark = pytest.mark.usefixtures("seen_texts")


def emulated(packed: PanelsWeight) -> Any:
    """The weight (N, K) by the independent reader of panels, with its steps in float32."""
    config, fields = packed.config, packed.fields()
    fields.pop("header", None)
    read = emulators.panels_weight(
        **fields,
        bits=config.stored_bits,
        group_size=config.group_size,
        K=packed.layer.K,
        zero=config.default_zero,
        of_codes=config.offset == "code",
    )
    return read[:, : packed.layer.N].T.contiguous()


@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
def test_a_weight_in_panels_has_equal_values_and_is_restored(case: Case) -> None:
    weight = drawn(case)
    packed: Any = repack(weight, "panels")

    assert type(packed) is PanelsWeight
    assert_same_bits(packed.dequantize(), weight.dequantize())
    if packed.config.rounding is None:
        assert_same_bits(emulated(packed), weight.dequantize())
    restored = restore(packed)
    assert (type(restored), restored.config) == (type(weight), weight.config)
    assert restored.fields().keys() == weight.fields().keys()
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_small_numbers_are_read_by_the_emulator(case: Case) -> None:
    """Powers of two as scales: no step is rounded."""
    weight = drawn(case, filling="coded")

    assert torch.equal(emulated(repack(weight, "panels")), weight.dequantize())  # type: ignore[arg-type]


def test_zero_points_that_are_the_default_are_left_out() -> None:
    for name, fields in (
        ("mlx 4 bits", {"qweight", "scales", "offsets"}),
        ("torchao int4", {"qweight", "scales", "zeros", "offsets"}),
        ("Q4_1", {"qweight", "scales", "offsets"}),
        ("Q5_0", {"qweight", "scales"}),
        ("Q6_K", {"qweight", "scales", "header"}),
        ("Q4_K", {"qweight", "scales", "offsets", "header"}),
    ):
        assert repack(drawn(ALL[name]), "panels").fields().keys() == fields


@pytest.mark.parametrize("name", ["mlx 4 bits", "hqq 4 bits", "Q4_K", "ct_pack 5 bits"])
def test_other_layouts_refuse_them_by_name(name: str) -> None:
    weight = drawn(ALL[name])
    reason = (
        "other layouts have 2, 3, 4 or 8 bits, got 5" if "5" in name else "its float offsets have no place"
    )
    for layout in ("gptq", "awq", "exllama", "marlin"):
        with pytest.raises(RepackError, match=f"{reason}.*is repacked to"):
            repack(weight, layout)


def hqq(**config: Any) -> Weight:
    return drawn((HQQWeight, HQQConfig(**{"bits": 4, "group_size": 64} | config), FP16))


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (hqq(axis=0, group_size=8), "its groups run along the outputs .axis 0."),
        (
            HQQWeight(
                config=HQQConfig(4, 80, N=40, K=256),
                weight=torch.zeros(64, 80, dtype=torch.uint8),
                scale=torch.ones(128, 1),
                zero=torch.ones(128, 1),
            ),
            "its groups of 80 elements cross outputs, as K is 256",
        ),
        (hqq(bits=1), "codes of 1 bits"),
        (
            replace(drawn(CASES["mlx 4 bits"]), biases=torch.zeros(40, 8)),
            "scales and offsets are bfloat16 and float32",
        ),
    ],
    ids=["axis 0", "groups across outputs", "1 bit", "two dtypes"],
)
def test_what_panels_cannot_represent_is_refused_with_the_reason(weight: Weight, reason: str) -> None:
    with pytest.raises(RepackError, match=reason):
        repack(weight, "panels")


def test_unused_bits_are_refused() -> None:
    weight = drawn(CASES["hqq 3 bits"])
    weight.weight[0, 0] |= 1 << 30

    with pytest.raises(RepackError, match="the unused bits of a word are not 0"):
        repack(weight, "panels")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_shifts_of_quanto_that_are_integers_are_zero_points(dtype: torch.dtype) -> None:
    weight = drawn((QuantoWeight, QuantoConfig(4, 64), BF16))
    weight = replace(weight, weight_shift=(torch.arange(160)[:, None] % 16).to(dtype))
    packed: Any = repack(weight, "panels")

    assert (packed.config.offset, packed.config.zero_point) == ("none", True)
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_bits(restore(packed).fields()["weight_shift"], weight.weight_shift)
    if dtype == torch.int8:
        weight.weight_shift[3] = -2
        with pytest.raises(RepackError, match="a zero point of -2 does not fit a byte"):
            repack(weight, "panels")


def test_steps_are_rounded_as_in_the_checkpoint() -> None:
    weight = drawn((QuantoWeight, QuantoConfig(4, 64), BF16))
    config: Any = repack(weight, "panels").config

    assert config.rounding is not None
    assert not torch.equal(emulated(repack(weight, "panels")), weight.dequantize())  # type: ignore[arg-type]


def test_one_scale_of_many_dtypes() -> None:
    for dtype in (BF16, FP16, FP32):
        weight = drawn((MLXWeight, MLXConfig(4, 64), dtype), N=16, K=64)
        assert {repack(weight, "panels").fields()[name].dtype for name in ("scales", "offsets")} == {dtype}


@pytest.mark.parametrize("order", ["panels", "strips"])
@pytest.mark.parametrize("layout", ["gptq", "awq", "exllama", "marlin"])
def test_other_layouts_refuse_the_offsets_of_a_kernel_order(order: str, layout: str) -> None:
    weight = repack(drawn(ALL["mlx 4 bits"], 64, 256, "noise"), order)

    with pytest.raises(RepackError, match="its float offsets have no place in other layouts"):
        repack(weight, layout)


def test_the_bound_covers_offsets_that_cancel_products() -> None:
    """All weights are 0, and kernels subtract two sums of 256 inputs."""
    ones = torch.ones(16, 8)
    codes = torch.full((16, 32), -1, dtype=torch.int32).view(torch.uint32)  # all codes are 15
    weight = repack(
        MLXWeight(config=MLXConfig(4, 32), weight=codes, scales=ones, biases=-15 * ones), "panels"
    )
    x = torch.rand(3, 256, generator=torch.Generator().manual_seed(0))
    plain = torch.full((256, 16), 15.0)

    assert not weight.dequantize().any()
    assert ((x @ plain) - 15 * x.sum(1, keepdim=True)).any()
    assert_within_bound(lambda x: x @ plain - 15 * x.sum(1, keepdim=True), weight, x)
