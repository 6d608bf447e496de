"""FP8 bytes in Marlin's order: every shape of scales, both dialects, and refusals."""

from typing import Any

import pytest
import torch

from qload.errors import ArgumentError, CastError, RepackError
from qload.formats import Fp8Config, Fp8Weight
from qload.kernel_formats import Fp8MarlinWeight, repack, restore
from qload.layouts import STORED_MINUS_ONE
from qload.spec import Layer
from qload.testing import assert_same_bits, emulators

pytestmark = pytest.mark.usefixtures("seen_texts")


def ones(N: int = 64, K: int = 128) -> torch.Tensor:
    return torch.ones(N, K).to(torch.float8_e4m3fn)


def stored(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None = None, **more: Any
) -> Fp8Weight:
    config = Fp8Config("block", block) if block else Fp8Config()
    scale = scale.reshape(1) if scale.ndim == 0 else scale
    return Fp8Weight(config=config, weight=weight, weight_scale=scale, **more)


def pack(
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype = torch.float16,
    bias: bool = True,
    **more: Any,
) -> Fp8MarlinWeight:
    packed = repack(stored(weight, scale, **more), "marlin", dtype=dtype, exponent_bias=bias)
    assert isinstance(packed, Fp8MarlinWeight)
    return packed


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_scale_of_any_shape_serves_every_column(shape: tuple[int, ...]) -> None:
    packed = pack(ones(), torch.full(shape, 0.25))

    assert tuple(packed.scales.shape) == (1, 64)
    assert set(packed.scales.flatten().tolist()) == {0.25 * 2**8}
    assert set(packed.dequantize().flatten().tolist()) == {0.25}


@pytest.mark.parametrize("shape", [(64,), (64, 1), (1, 64)], ids=str)
def test_a_scale_an_output_of_any_shape_stays_with_its_column(shape: tuple[int, ...]) -> None:
    scale = torch.arange(1, 65).float()

    packed = pack(ones(), scale.reshape(shape))

    assert torch.equal(packed.dequantize(), scale[:, None].expand(64, 128))


def test_four_rows_of_bytes_are_a_word() -> None:
    """Rows 0, 8, 1, 9 of column 0: lane 0 of the first tile."""
    weight = torch.zeros(64, 128, dtype=torch.uint8)
    for row, value in {0: 0x38, 1: 0x40, 8: 0x44, 9: 0x48}.items():
        weight[0, row] = value

    packed = pack(weight.view(torch.float8_e4m3fn), torch.tensor(1.0))

    assert int(packed.qweight[0, 0]) == 0x48404438


def test_a_scale_a_block_covers_its_outputs_and_inputs_ragged_ones_too() -> None:
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])

    packed = pack(ones(200, 300), scale, block=(128, 128))

    want = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(packed.dequantize(), want)


@pytest.mark.parametrize(("dtype", "power"), [(torch.float16, 8), (torch.bfloat16, 120)], ids=str)
def test_the_two_dialects_differ_by_the_exponent_and_mean_the_same(dtype: torch.dtype, power: int) -> None:
    scale = torch.tensor([0.5])
    with_bias = pack(ones(), scale, dtype)
    without = pack(ones(), scale, dtype, bias=False)

    assert torch.equal(with_bias.scales.double(), without.scales.double() * 2.0**power)
    assert torch.equal(with_bias.dequantize(), without.dequantize())
    assert_same_bits(with_bias.qweight, without.qweight)


def test_a_small_scale_is_not_rounded_as_a_subnormal_first() -> None:
    """vLLM casts to fp16 before it multiplies by 2**8, and loses 9 bits of this scale."""
    scale = torch.tensor([1.2345e-7])

    packed = pack(ones(), scale)

    right = (scale * 2**8).half()
    assert torch.equal(packed.scales[0, :1], right)
    assert not torch.equal(scale.half() * 2**8, right)


def test_padding_holds_zeros_and_is_cut_off_again() -> None:
    packed = pack(ones(72, 100), torch.tensor(1.0))
    N, K = packed.scales.shape[1], packed.qweight.shape[0] * 16

    assert (N % 128 == 0 and K % 64 == 0) or (N % 64 == 0 and K % 128 == 0)
    whole = emulators.fp8_marlin_weight(packed.qweight, packed.scales, exponent_bias=True)
    assert whole.sum() == packed.dequantize().sum() == 72 * 100


HALF = {"dtype": torch.float16, "exponent_bias": True}


@pytest.mark.parametrize(
    ("scale", "block"),
    [
        pytest.param(torch.tensor([0.3]), None, id="tensor"),
        pytest.param(torch.rand(1, 1).half() + 0.1, None, id="one by one"),
        pytest.param(torch.rand(72, 1) + 0.1, None, id="channel"),
        pytest.param(torch.rand(1, 3).bfloat16() + 0.1, (128, 128), id="blocks"),
        pytest.param(
            torch.full((1, 3), 0.25).to(torch.float8_e8m0fnu), (128, 128), id="blocks of powers of 2"
        ),
    ],
)
@pytest.mark.parametrize("input_scale", [None, torch.tensor([0.7])], ids=["dynamic", "static"])
@pytest.mark.parametrize("divide", [False, True])
def test_every_fp8_weight_comes_back_bit_for_bit(
    scale: torch.Tensor, block: Any, input_scale: torch.Tensor | None, divide: bool
) -> None:
    config = Fp8Config("block", block, divide=divide) if block else Fp8Config(divide=divide)
    bytes_ = torch.arange(72 * 300).remainder(256).to(torch.uint8).reshape(72, 300)
    weight = Fp8Weight(
        config=config, weight=bytes_.view(torch.float8_e4m3fn), weight_scale=scale, input_scale=input_scale
    )

    packed = repack(weight, "marlin", **HALF)  # type: ignore[arg-type]
    restored = restore(packed)

    assert type(packed) is Fp8MarlinWeight
    assert (type(restored), restored.config, restored.layer) == (Fp8Weight, weight.config, weight.layer)
    assert restored.fields().keys() == weight.fields().keys()
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name].view(torch.uint8), tensor.view(torch.uint8))


def test_fused_parts_have_their_own_scale_in_their_own_columns() -> None:
    weight = Fp8Weight(
        config=Fp8Config("parts", axes="P"),
        weight=ones(96),
        weight_scale=torch.tensor([0.5, 4.0]),
        layer=Layer((32, 64), 128, (96, 128), "qk"),
    )

    packed = repack(weight, "marlin", **HALF)  # type: ignore[arg-type]

    assert packed.dequantize()[:, 0].tolist() == [0.5] * 32 + [4.0] * 64
    assert_same_bits(restore(packed).fields()["weight_scale"], weight.weight_scale)


def test_a_weight_built_by_hand_is_not_restored() -> None:
    packed = pack(ones(), torch.tensor(1.0))
    by_hand = Fp8MarlinWeight(config=packed.config, layer=Layer((64,), 128, (64, 128)), **packed.fields())

    with pytest.raises(RepackError, match="built by hand"):
        restore(by_hand)


E5M2 = ones().to(torch.float8_e5m2)
REFUSED = [
    pytest.param(stored(E5M2, torch.ones(1)), {}, RepackError, "e4m3fn, got float8_e5m2", id="e5m2"),
    pytest.param(
        stored(ones(), torch.ones(1, 3), block=(64, 48)), {}, RepackError, "got 48", id="blocks of 48"
    ),
    pytest.param(
        stored(ones(), torch.ones(1)), {"dtype": torch.float32}, ArgumentError, "float16 or", id="float32"
    ),
    pytest.param(
        stored(ones(), torch.ones(1)), {"dtype": None}, ArgumentError, "got      None", id="no dtype"
    ),
    pytest.param(
        stored(ones(), torch.ones(1)),
        {"exponent_bias": None},
        ArgumentError,
        "the kernel applies",
        id="no bias",
    ),
    pytest.param(
        stored(ones(), torch.ones(1)),
        {"zeros": STORED_MINUS_ONE},
        ArgumentError,
        "None, as only",
        id="zero points",
    ),
    pytest.param(
        stored(ones(), torch.tensor(300.0)),
        {},
        CastError,
        "overflows\n(.|\n)*bfloat16 activ",
        id="beyond fp16",
    ),
    pytest.param(
        stored(ones(), torch.tensor(2.0**10)),
        {"dtype": torch.bfloat16},
        CastError,
        "exponent_bias=False",
        id="beyond bf16 with its factor",
    ),
    pytest.param(
        stored(ones(), torch.tensor(1e-12)), {}, CastError, "underflows", id="a scale that would be 0"
    ),
    pytest.param(
        stored(ones(), torch.tensor(1.2e-8)),
        {},
        CastError,
        r"weight_scale \* 2\*\*8: a cast from float32 to float16 underflows",
        id="a scale that loses bits as a subnormal",
    ),
    pytest.param(
        stored(ones(), torch.tensor([1.0] * 63 + [1e-5])),
        {"exponent_bias": False},
        CastError,
        "got      1e-05\n",
        id="one output's scale loses bits",
    ),
]


@pytest.mark.parametrize(("weight", "change", "error", "text"), REFUSED)
def test_an_unsupported_weight_or_option_is_refused(
    weight: Fp8Weight, change: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        repack(weight, "marlin", **{**HALF, **change})
