"""FP8: what a byte and its scale mean, in both dialects, and what is no FP8 layer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import (
    ArgumentError,
    CastError,
    DtypeError,
    MismatchError,
    MissingTensorError,
    ShapeError,
    UnsupportedFormatError,
)
from qload.formats import Fp8Config, Fp8Weight
from qload.kernel_formats.fp8_fnuz import to_fnuz
from qload.testing import assert_same_bits
from tests.formats.fp8_layers import BLOCKS, codes, layer, weights

pytestmark = pytest.mark.usefixtures("seen_texts")

ONE, TWO, NEGATIVE = 0x38, 0x40, 0xB8  # bytes of 1, 2 and -1


def e4m3fn(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_blocks_by_hand_short_ones_too() -> None:
    """Blocks of two outputs and three inputs; the last of both is short."""
    weight = Fp8Weight(
        config=Fp8Config("block", (2, 3)),
        weight=e4m3fn([ONE, ONE, ONE, TWO], [ONE, ONE, TWO, ONE], [NEGATIVE, ONE, ONE, TWO]),
        weight_scale=torch.tensor([[1.0, 10.0], [100.0, 1000.0]]),
    )

    assert weight.dequantize().tolist() == [[1, 1, 1, 20], [1, 1, 2, 10], [-100, 100, 100, 2000]]


def test_blocks_by_hand_as_modelopt_stores_their_scales() -> None:
    """An axis of one for the inside of each block changes nothing; it is kept."""
    weight = Fp8Weight(
        config=Fp8Config("block", (2, 3)),
        weight=e4m3fn([ONE, ONE, ONE, TWO], [ONE, ONE, TWO, ONE], [NEGATIVE, ONE, ONE, TWO]),
        weight_scale=torch.tensor([[[[1.0], [10.0]]], [[[100.0], [1000.0]]]]),
    )

    assert weight.weight_scale.shape == (2, 1, 2, 1)
    assert weight.dequantize().tolist() == [[1, 1, 1, 20], [1, 1, 2, 10], [-100, 100, 100, 2000]]


def test_the_other_float8_by_hand() -> None:
    """e5m2 has a byte more of exponent: 0x3C is 1, 0x7B its largest, 0x7C infinity."""
    stored = torch.tensor([[0x3C, 0x7B, 0x7C]], dtype=torch.uint8).view(torch.float8_e5m2)

    weight = Fp8Weight(config=Fp8Config(), weight=stored, weight_scale=torch.tensor([0.5]))

    assert weight.dequantize().tolist() == [[0.5, 57344 / 2, torch.inf]]


@pytest.mark.parametrize(
    ("name", "divide", "want"),
    [
        pytest.param("weight_scale", False, 4.0, id="weight_scale"),
        pytest.param("weight_scale_inv", False, 4.0, id="despite its name"),
        pytest.param("weight_scale_inv", True, 0.25, id="where the config says inverse"),
    ],
)
def test_trap_42_a_scale_multiplies_under_both_names_and_divides_in_one_dialect(
    name: str, divide: bool, want: float
) -> None:
    tensors = layer("a", e4m3fn([ONE]), torch.tensor(4.0), name)

    assert weights(tensors, Fp8Config(divide=divide)).get_weights("a").dequantize().tolist() == [[want]]


def test_the_dialect_that_divides_has_no_other_name_for_its_scale() -> None:
    tensors = layer("a", e4m3fn([ONE]), torch.tensor(4.0), "weight_scale")

    with pytest.raises(MissingTensorError, match=r"a\.weight_scale_inv: not in the checkpoint"):
        weights(tensors, Fp8Config(divide=True)).get_weights("a")


def test_trap_44_scales_of_blocks_are_never_cast() -> None:
    scale = torch.tensor([[1.0009765625 + 2**-20]])
    tensors = layer("a", codes(128, 128), scale, "weight_scale_inv")

    weight: Any = weights(tensors, BLOCKS, dtype=torch.bfloat16).get_weights("a")

    assert_same_bits(weight.weight_scale, scale)
    assert_same_bits(weight.dequantize(), codes(128, 128).float() * scale)


def test_scales_that_are_powers_of_two_are_read_as_they_are_stored() -> None:
    scale = torch.tensor([[2.0**-100]]).to(torch.float8_e8m0fnu)
    tensors = layer("a", codes(8, 8), scale, "weight_scale_inv")

    assert_same_bits(weights(tensors, BLOCKS).get_weights("a").dequantize(), codes(8, 8).float() * 2.0**-100)


def test_trap_45_a_byte_that_is_no_number_stays_in_its_place() -> None:
    tensors = layer("a", e4m3fn([ONE, 0x7F, 0xFF, 0x7E]), torch.tensor(2.0))

    got = weights(tensors).get_weights("a").dequantize()

    assert got.isnan().tolist() == [[False, True, True, False]]
    assert got[0, [0, 3]].tolist() == [2, 896]


@pytest.mark.parametrize("divide", [False, True])
def test_trap_45_fnuz_has_no_negative_zero_and_means_half(divide: bool) -> None:
    scale, input_scale = torch.tensor([0.75]), torch.tensor([3.0])
    weight = Fp8Weight(
        config=Fp8Config(divide=divide),
        weight=torch.cat([codes(4, 64), e4m3fn([0x80] * 64)]),
        weight_scale=scale,
        input_scale=input_scale,
    )

    other = to_fnuz(weight)

    assert other.weight.view(torch.uint8)[-1].tolist() == [0] * 64
    assert torch.equal(other.dequantize(), weight.dequantize())
    assert other.weight_scale.tolist() == [0.375 if divide else 1.5]
    assert other.input_scale is not None
    assert other.input_scale.tolist() == [6]


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_trap_45_nan_does_not_become_a_number_of_fnuz(byte: int) -> None:
    weight = Fp8Weight(config=Fp8Config(), weight=e4m3fn([ONE, byte]), weight_scale=torch.tensor([1.0]))

    with pytest.raises(MismatchError, match="e4m3fnuz would read NaN as a number"):
        to_fnuz(weight)


@pytest.mark.parametrize(
    ("scale", "divide", "text"),
    [
        (torch.tensor([40000.0], dtype=torch.float16), False, "float16 overflows\n  got      80000"),
        (torch.tensor([2.0**127]).to(torch.float8_e8m0fnu), False, "float8_e8m0fnu overflows"),
        (torch.tensor([6e-8], dtype=torch.float16), True, "float16 underflows"),
        (torch.tensor([3e38]), False, "float32 overflows\n  got      6e"),
    ],
    ids=["fp16", "e8m0", "half of a divisor", "fp32"],
)
def test_trap_45_a_scale_whose_double_has_no_room_is_refused(scale: Tensor, divide: bool, text: str) -> None:
    config = Fp8Config(divide=divide)
    weight = Fp8Weight(config=config, weight=codes(4, 64), weight_scale=scale)

    with pytest.raises(CastError, match=rf"weight_scale: .*{text}"):
        to_fnuz(weight)


def test_trap_45_a_scale_of_activations_whose_double_has_no_room_is_refused() -> None:
    limit = torch.tensor([40000.0], dtype=torch.float16)
    weight = Fp8Weight(config=Fp8Config(), weight=codes(4, 64), weight_scale=torch.ones(1), input_scale=limit)

    with pytest.raises(CastError, match="input_scale: a cast from float16 to float16 overflows"):
        to_fnuz(weight)


def test_only_e4m3fn_has_a_twin_in_fnuz() -> None:
    weight = Fp8Weight(
        config=Fp8Config(), weight=torch.ones(2, 2).to(torch.float8_e5m2), weight_scale=torch.ones(1)
    )

    with pytest.raises(DtypeError, match="got      float8_e5m2"):
        to_fnuz(weight)


def test_trap_46_a_static_activation_scale_is_kept_and_asked_for_where_it_is_claimed() -> None:
    stored = layer("a", codes(8, 8), torch.tensor(1.0))
    static = Fp8Config(input_scale=True)

    kept: Any = weights({**stored, "a.input_scale": torch.tensor(0.5)}, static).get_weights("a")
    dynamic: Any = weights(stored).get_weights("a")

    assert kept.input_scale.tolist() == [0.5]
    assert dynamic.input_scale is None
    with pytest.raises(MissingTensorError, match=r"a\.input_scale"):
        weights(stored, static).get_weights("a")


def test_a_claimed_type_that_the_weight_is_not_is_a_note() -> None:
    opened = weights(layer("a", codes(8, 8), torch.tensor(1.0)), Fp8Config(dtype=torch.float8_e5m2))

    assert opened.get_weights("a").weight.dtype == torch.float8_e4m3fn
    assert opened.report().notes == ("a: the config says float8_e5m2, the weight is float8_e4m3fn",)


SHAPES = [
    pytest.param(BLOCKS, (1, 3), r"expected \(2, 3\) = \(N/128\^, K/128\^\)", id="a grid without the tail"),
    pytest.param(BLOCKS, (3, 2), r"expected \(2, 3\)", id="a grid on its side"),
    pytest.param(BLOCKS, (), r"expected \(2, 3\)", id="no grid"),
    pytest.param(Fp8Config(), (2, 3), "weight_block_size", id="a grid that nobody claimed"),
    pytest.param(Fp8Config(), (320, 1), r"\(200,\), \(200, 1\) or \(1, 200\)", id="one an input"),
    pytest.param(Fp8Config(), (1, 320), r"\(200,\), \(200, 1\) or \(1, 200\)", id="and lying"),
    pytest.param(Fp8Config("channel"), (), r"one an output", id="one, for outputs"),
    pytest.param(Fp8Config("tensor"), (200, 1), r"one for the tensor", id="outputs, for one"),
    pytest.param(Fp8Config("tensor"), (3,), r"one for the tensor", id="parts, for one"),
]


@pytest.mark.parametrize(("config", "shape", "text"), SHAPES)
def test_a_scale_of_another_shape_than_claimed_is_refused(
    config: Fp8Config, shape: tuple[int, ...], text: str
) -> None:
    tensors = layer("a", codes(200, 320), torch.ones(shape))

    with pytest.raises(ShapeError, match=rf"(?s)a\.weight_scale: wrong shape.*{text}"):
        weights(tensors, config).get_weights("a")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        pytest.param({"a.weight": torch.ones(8, 8)}, DtypeError, r"a\.weight: wrong dtype", id="plain codes"),
        pytest.param({"a.weight_scale": torch.ones(1).int()}, DtypeError, "_scale: wrong", id="whole scales"),
        pytest.param({"a.weight": codes(8, 8)[None]}, UnsupportedFormatError, r"\[1, 8, 8\]", id="experts"),
        pytest.param({"a.input_scale": torch.ones(2)}, ShapeError, r"\(\) or \(1,\)", id="two activations"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    change: dict[str, Tensor], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        weights({**layer("a", codes(8, 8), torch.tensor(1.0)), **change}).get_weights("a")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        pytest.param(
            {"per": "row"},
            "fp8: per\n  expected 'tensor' or 'parts' or 'channel' or 'block' or None",
            id="unknown",
        ),
        pytest.param({"per": "block"}, "fp8: block", id="blocks of no size"),
        pytest.param({"block": (128, 128)}, "fp8: block", id="a size of no blocks"),
        pytest.param({"per": "block", "block": (0, 128)}, "each at least 1", id="empty blocks"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(settings: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        Fp8Config(**settings)
