"""FP8 bytes in Marlin's order: every shape of scales, both dialects, and what is refused."""

import pytest
import torch

from qload.errors import ArgumentError, CastError, DtypeError, ShapeError
from qload.kernels import fp8_to_marlin
from qload.testing import assert_same_bits, emulators


def ones(N: int = 64, K: int = 128) -> torch.Tensor:
    return torch.ones(N, K).to(torch.float8_e4m3fn)


def pack(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float16, **more: object):  # type: ignore[no-untyped-def]
    return fp8_to_marlin(weight, scale, dtype=dtype, exponent_bias=True, **more)  # type: ignore[arg-type]


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
    with_bias = fp8_to_marlin(ones(), scale, dtype=dtype, exponent_bias=True)
    without = fp8_to_marlin(ones(), scale, dtype=dtype, exponent_bias=False)

    assert torch.equal(with_bias.scales.double(), without.scales.double() * 2.0**power)
    assert torch.equal(with_bias.dequantize(), without.dequantize())
    assert_same_bits(with_bias.qweight, without.qweight)


def test_a_small_scale_is_not_rounded_as_a_subnormal_first() -> None:
    """The original casts to fp16 before it multiplies by 2**8, and loses 9 bits of this one."""
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


REFUSED = [
    pytest.param({"scale": torch.ones(2, 3)}, ShapeError, "scales need `block`", id="blocks unsaid"),
    pytest.param({"scale": torch.ones(2, 2), "block": (128, 128)}, ShapeError, "N/128", id="other blocks"),
    pytest.param({"weight": torch.ones(64, 128).to(torch.float8_e5m2)}, DtypeError, "e5m2", id="e5m2"),
    pytest.param({"dtype": torch.float32}, ArgumentError, "float16 or torch.bfloat16", id="float32"),
    pytest.param({"scale": torch.tensor(300.0)}, CastError, "overflows", id="a scale beyond fp16"),
    pytest.param(
        {"scale": torch.ones(1, dtype=torch.int32)}, DtypeError, "got      int32", id="codes as scale"
    ),
]


@pytest.mark.parametrize(("change", "error", "text"), REFUSED)
def test_what_cannot_be_packed_is_refused(
    change: dict[str, object], error: type[Exception], text: str
) -> None:
    arguments = {"weight": ones(), "scale": torch.tensor(1.0), "dtype": torch.float16, **change}

    with pytest.raises(error, match=text):
        fp8_to_marlin(exponent_bias=True, **arguments)  # type: ignore[arg-type]
