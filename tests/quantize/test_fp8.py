"""FP8 from plain weights: the scale, its limits, and one scale for several parts."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError, MismatchError
from qload.formats import Fp8Config, Fp8Weight
from qload.quantize import Fp8Quantizer, requantize
from qload.quantize.quantizers import saturated
from qload.spec import Layer
from qload.testing import assert_same_bits
from tests.formats.fp8_layers import codes, layer, weights

pytestmark = pytest.mark.usefixtures("seen_texts")

PER: list[Literal["tensor", "channel"]] = ["tensor", "channel"]


def quantized(weight: Tensor, quantizer: Fp8Quantizer) -> Fp8Weight:
    N, K = weight.shape
    return quantizer.quantize(weight, Layer((N,), K, (N, K), "a"), weight.dtype)


def test_the_largest_value_is_448_by_hand() -> None:
    weight = torch.tensor([[-896.0, 2.0, 1.0, 0.0], [0.0, 4.48, 0.01, -0.07]])

    one = quantized(weight, Fp8Quantizer("tensor"))
    each = quantized(weight, Fp8Quantizer("channel"))

    assert one.weight_scale.tolist() == [2]
    assert one.weight.float().tolist()[0] == [-448, 1, 0.5, 0]
    assert_same_bits(each.weight_scale, (torch.tensor([[896.0], [4.48]]) / 448))
    assert each.weight.float().tolist() == [[-448, 1, 0.5, 0], [0, 448, 1, -7]]


def test_blocks_have_scales_of_their_own_short_ones_too() -> None:
    weight = torch.ones(5, 7)
    weight[4, 6], weight[0, 0] = 448 * 4, 448

    scale = quantized(weight, Fp8Quantizer("block", (4, 6))).weight_scale

    assert_same_bits(scale, torch.tensor([[1, 1 / 448], [1 / 448, 4]]))


@pytest.mark.parametrize("per", PER)
def test_a_weight_that_fp8_holds_comes_back_bit_for_bit(per: Literal["tensor", "channel"]) -> None:
    weight = codes(16, 32).float()
    weight[:, 0] = 448

    assert torch.equal(quantized(weight, Fp8Quantizer(per)).dequantize(), weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_every_value_is_off_by_at_most_half_a_step(dtype: torch.dtype) -> None:
    """Of a float of three mantissa bits; float32 rounds the weight, its quotient and its product as well."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = quantized(weight, Fp8Quantizer("tensor"))

    bytes_, meant, wide = made.weight.double(), made.dequantize().double(), weight.double()
    step = 2.0 ** (bytes_.abs().log2().floor().clamp(min=-6) - 3) * made.weight_scale.double()
    slack = torch.finfo(torch.float32).eps / 2 * (2 * wide.abs() + meant.abs())
    assert bool(((meant - wide).abs() <= step / 2 + slack).all())


@pytest.mark.parametrize("quantizer", [Fp8Quantizer(per) for per in PER], ids=PER)
def test_trap_45_zeros_stay_zeros(quantizer: Fp8Quantizer) -> None:
    made = quantized(torch.zeros(4, 8), quantizer)

    assert bool((made.weight_scale > 0).all())
    assert_same_bits(made.dequantize(), torch.zeros(4, 8))


@pytest.mark.parametrize("largest", [3e38, 1e-3, 1e-37, 1e-45])
def test_trap_45_values_saturate_and_never_become_infinite(largest: float) -> None:
    weight = torch.tensor([[largest, -largest, largest / 3]])

    made = quantized(weight, Fp8Quantizer("channel"))

    assert bool(made.weight.float().isfinite().all())
    assert float(made.weight.float().abs().max()) <= 448
    assert bool(made.dequantize().isfinite().all())


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448), (torch.float8_e5m2, 57344)])
def test_trap_45_what_is_beyond_the_largest_rounds_to_it(dtype: torch.dtype, largest: int) -> None:
    got = saturated(torch.tensor([1e30, -1e30, 1.0, torch.nan]), dtype).float()

    assert got[:3].tolist() == [largest, -largest, 1]
    assert got[3].isnan()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_trap_45_what_has_no_scale_is_refused_by_name_and_place(value: float) -> None:
    weight = torch.ones(4, 8)
    weight[2, 3] = value

    with pytest.raises(MismatchError) as caught:
        quantized(weight, Fp8Quantizer())

    assert str(caught.value).splitlines() == [
        "a.weight: cannot be quantized",
        "  expected finite values",
        f"  got      {value:g} at (2, 3) (1 in all)",
    ]


def test_trap_46_the_limit_of_activation_scales_is_kept_and_does_not_change_the_weight() -> None:
    limited, free = (quantized(torch.ones(2, 2), Fp8Quantizer(activation_scale_ub=u)) for u in (12.0, None))

    assert (limited.config.activation_scale_ub, free.config.activation_scale_ub) == (12, None)
    assert_same_bits(limited.weight_scale, free.weight_scale)


@pytest.mark.parametrize("settings", [{"per": "block"}, {"per": "tensor", "block": (2, 2)}, {"per": "row"}])
def test_settings_there_are_none_of_are_refused(settings: Any) -> None:
    with pytest.raises(ArgumentError, match="fp8: "):
        Fp8Quantizer(**settings)


def fused(divide: bool = False, scales: tuple[float, ...] = (0.5, 2.0, 0.25)) -> Fp8Weight:
    tensors: dict[str, Tensor] = {}
    for i, scale in enumerate(scales):
        tensors |= layer(f"p{i}", codes(8, 32, i), torch.tensor(scale), "weight_scale_inv")
    made = weights(tensors, Fp8Config(divide=divide), nonfinite="allow").get_multi_weights_col(
        [f"p{i}" for i in range(len(scales))]
    )
    assert isinstance(made, Fp8Weight)
    return made


@pytest.mark.parametrize(("divide", "largest", "kept"), [(False, 2.0, 1), (True, 0.25, 2)])
def test_trap_43_parts_are_brought_to_the_largest_scale_when_asked(
    divide: bool, largest: float, kept: int
) -> None:
    before = fused(divide)

    made, error = requantize(before)

    assert made.weight_scale.tolist() == [largest] * 3
    old, new = before.dequantize().split(8), made.dequantize().split(8)
    assert_same_bits(error, torch.stack([(a - b).abs().max() for a, b in zip(new, old, strict=True)]))
    assert torch.equal(new[kept], old[kept])
    assert error.tolist() == [0.0 if i == kept else e for i, e in enumerate(error.tolist())]
    assert max(error.tolist()) > 0


def test_one_scale_for_all_changes_nothing() -> None:
    before = fused(scales=(3.0, 3.0))

    made, error = requantize(before)

    assert error.tolist() == [0, 0]
    assert torch.equal(made.dequantize(), before.dequantize())


@pytest.mark.parametrize("scales", [(0.0, 1.0), (torch.inf, 1.0), (torch.nan, 1.0)])
def test_scales_of_which_none_is_the_largest_are_refused(scales: tuple[float, ...]) -> None:
    with pytest.raises(MismatchError, match="there is no largest scale"):
        requantize(fused(scales=scales))


def test_only_a_scale_a_part_has_a_largest() -> None:
    made = quantized(torch.ones(2, 2), Fp8Quantizer("channel"))

    with pytest.raises(ArgumentError, match="one scale a channel"):
        requantize(made)
