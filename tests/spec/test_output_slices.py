"""Some outputs of a weight are a weight of their own, which means the same rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.devices.tensors import shares_memory
from qload.formats import (
    FORMATS,
    CTMXFP4Weight,
    CTNVFP4Weight,
    Fp8Config,
    Fp8Weight,
    MXFP4Config,
    MXFP4ExpertsWeight,
    NVFP4Config,
)
from qload.kernel_formats import repack
from qload.spec import Layer, Weight, can_cut, outputs, ranges
from qload.testing import Traits, assert_same_bits, layer_of, layers
from tests.example_counts import at_most
from tests.format_cases import CONFIGS

MATRICES = [weight_type for weight_type in FORMATS if weight_type is not MXFP4ExpertsWeight]
every_matrix = pytest.mark.parametrize("weight_type", MATRICES, ids=lambda weight_type: weight_type.format)


def assert_rows(weight: Weight, most: int) -> None:
    __tracebackhide__ = True
    whole, end = weight.dequantize(), 0
    for start, stop in ranges(weight, most):
        assert start == end
        assert can_cut(weight, start, stop)
        piece = outputs(weight, start, stop)
        assert piece.shape == (stop - start, weight.layer.K)
        assert_same_bits(piece.dequantize(), whole[start:stop])
        end = stop
    assert end == weight.layer.N


@every_matrix
@given(data=st.data(), most=st.integers(1, 200))
@at_most(15)
def test_ranges_of_outputs_mean_rows_of_the_whole(weight_type: type[Weight], data: Any, most: int) -> None:
    assert_rows(data.draw(layers(weight_type, CONFIGS[weight_type], most=3)).weight(), most)


def gptq(K: int, N: int, act_order: bool) -> Any:
    traits = Traits("gptq", 4, 32, symmetric=False, act_order=act_order, zeros="v2")
    return layer_of(traits, N, K, filling="noise").weight()


@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act order"])
@pytest.mark.parametrize("layout", ["marlin", "strips", "panels", "exllama"])
@pytest.mark.parametrize(("K", "N"), [(128, 256), (96, 200), (64, 392)])
def test_kernel_orders_are_cut_too_padding_and_all(layout: str, K: int, N: int, act_order: bool) -> None:
    weight = repack(gptq(K, N, act_order), layout)

    assert_rows(weight, 64)
    assert len(list(ranges(weight, 64))) > 1


@pytest.mark.parametrize(("K", "N"), [(128, 256), (96, 200)])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "fp8"])
def test_floats_in_marlins_order_are_cut_too(kind: str, K: int, N: int) -> None:
    make = torch.Generator().manual_seed(K + N)

    def drawn(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=make, dtype=torch.uint8)

    one = torch.ones(1)
    weights: dict[str, Weight] = {
        "nvfp4": CTNVFP4Weight(
            config=NVFP4Config(),
            weight_packed=drawn(N, K // 2),
            weight_scale=drawn(N, K // 16, low=0x30, high=0x50).view(torch.float8_e4m3fn),
            weight_global_scale=one,
        ),
        "mxfp4": CTMXFP4Weight(
            config=MXFP4Config(),
            weight_packed=drawn(N, K // 2),
            weight_scale=drawn(N, K // 32, low=120, high=130),
        ),
        "fp8": Fp8Weight(
            config=Fp8Config("channel"),
            weight=drawn(N, K, high=0x70).view(torch.float8_e4m3fn),
            weight_scale=torch.rand(N, 1, generator=make) + 0.5,
        ),
    }
    options = {"exponent_bias": False} if kind == "fp8" else {}
    weight = repack(weights[kind], "marlin", dtype=torch.bfloat16, **options)

    assert_rows(weight, 64)
    assert len(list(ranges(weight, 64))) > 1


def test_fused_parts_keep_the_scales_of_the_outputs_that_are_there() -> None:
    codes = torch.arange(10 * 16).remainder(120).to(torch.uint8).view(10, 16).view(torch.float8_e4m3fn)
    weight = Fp8Weight(
        config=Fp8Config("parts", axes="P"),
        weight=codes,
        weight_scale=torch.tensor([1.0, 2.0, 4.0]),
        layer=Layer((2, 5, 3), 16, (10, 16)),
    )
    whole = weight.dequantize()

    for start in range(10):
        for stop in range(start + 1, 11):
            piece = outputs(weight, start, stop)
            assert_same_bits(piece.dequantize(), whole[start:stop])
            assert piece.shape == (stop - start, 16)
    two = outputs(weight, 3, 9)
    assert two.layer.parts == (4, 2)
    assert two.fields()["weight_scale"].tolist() == [2.0, 4.0]


@pytest.mark.parametrize(("start", "stop", "scales"), [(0, 2, [1.0]), (2, 7, [2.0]), (7, 10, [4.0])])
def test_a_fused_part_alone_has_its_own_scale(start: int, stop: int, scales: list[float]) -> None:
    weight = Fp8Weight(
        config=Fp8Config("parts", axes="P"),
        weight=torch.ones(10, 16).to(torch.float8_e4m3fn),
        weight_scale=torch.tensor([1.0, 2.0, 4.0]),
        layer=Layer((2, 5, 3), 16, (10, 16)),
    )

    piece = outputs(weight, start, stop)

    assert piece.fields()["weight_scale"].tolist() == scales
    assert piece.dequantize().unique().tolist() == scales


def test_ranges_are_few_even_and_no_larger_than_asked() -> None:
    weight = gptq(32, 1000, act_order=False)

    assert list(ranges(weight, 1000)) == [(0, 1000)]
    assert list(ranges(weight, 999)) == [(0, 504), (504, 1000)]
    assert list(ranges(weight, 300, even=128)) == [(0, 256), (256, 512), (512, 768), (768, 1000)]
    assert next(iter(ranges(weight, 100, even=128))) == (0, 96)  # no 128 fit
    assert not can_cut(weight, 4, 16)
    assert can_cut(weight, 8, 1000)


def test_a_piece_is_views_and_knows_its_layer() -> None:
    weight = replace(gptq(64, 64, act_order=False), layer=Layer((64,), 64, (128, 64), "up"))

    piece = outputs(weight, 16, 32)

    assert (piece.layer.parts, piece.layer.whole, piece.layer.name) == ((16,), (128, 64), "up")
    assert shares_memory(piece.fields()["scales"], weight.scales)
    assert outputs(weight, 0, 64) is weight
