"""EETQ from plain weights: by hand, against its owner's codes, and the same at every world size."""

import json
from math import floor
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qload.detect import DefaultWeightsLoader, loader_from_config
from qload.errors import CastError, MismatchError, ShapeError
from qload.formats import EETQWeight
from qload.parallel import FakeWorld, Rank
from qload.quantize import EETQQuantizer, QuantizingLoader
from qload.spec import Layer
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.paths import cases

pytestmark = pytest.mark.usefixtures("seen_texts")


def quantize(weight: Tensor) -> EETQWeight:
    N, K = weight.shape
    return EETQQuantizer().quantize(weight, Layer((N,), K, (N, K), name="a"), weight.dtype)


def codes(weight: Tensor) -> Tensor:
    """With their sign, (N, K)."""
    return quantize(weight).codes().codes.int() - 128


def row(*values: float) -> Tensor:
    """(64, 64) fp16, these values in the first row, then zeros."""
    weight = torch.zeros(64, 64, dtype=torch.float16)
    weight[0, : len(values)] = torch.tensor(values)
    return weight


def test_a_row_by_hand() -> None:
    """The largest is -128: the scale is 1. Halves are rounded away from zero."""
    weight = row(-128, 127, 0.5, -0.5, 1.5, 2.5, -2.5, 0.25, 3.7, -3.7, 3.3, -3.3, 126.9, -127.6)

    assert codes(weight)[0, :15].tolist() == [-128, 127, 1, -1, 2, 3, -3, 0, 4, -4, 3, -3, 127, -128, 0]
    assert quantize(weight).weight_scales[0] == 1


def test_the_largest_positive_value_is_127_steps() -> None:
    weight = row(256, -256, 255, 1)

    assert codes(weight)[0, :4].tolist() == [127, -128, 127, 1]
    assert quantize(weight).dequantize()[0, :4].tolist() == [254, -256, 254, 2]


def test_a_value_just_below_a_half_is_not_rounded_up() -> None:
    """One half added in float32 would be 1."""
    weight = row(-128).float()
    weight[0, 1] = torch.tensor(0.5).nextafter(torch.tensor(0.0))

    assert codes(weight)[0, 1] == 0


def test_codes_are_counted_in_the_step_and_not_in_the_scale_that_is_kept_of_it() -> None:
    """A step of 1.5 * 2**-24 is kept as 2 * 2**-24, the nearest that fp16 has."""
    made = quantize(row(-1.5 * 2.0**-17, 0.75 * 2.0**-17))

    assert (made.codes().codes[0, :2].int() - 128).tolist() == [-128, 64]
    assert made.weight_scales[0] == 2.0**-23


def test_a_row_of_zeros_is_zeros() -> None:
    made = quantize(row(1))

    assert not made.dequantize()[1:].any()
    assert not made.weight_scales[1:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_error_is_at_most_half_a_step_and_scales_are_half(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype)

    made = quantize(weight)

    step = weight.float().abs().amax(1, keepdim=True) / 128
    assert made.weight_scales.dtype == torch.float16
    assert_same_bits(made.weight_scales, step.half()[:, 0])
    lost = 128 * (step.half().float() - step).abs()
    code = made.codes().codes.int() - 128
    largest = weight.float() > 127 * step  # which code 127 stands for
    allowed = torch.where(largest, 1.0, 0.5 + 2**-16) * step + lost
    assert bool(((made.dequantize() - weight.float()).abs() <= allowed).all())
    whole = (weight.double() / step.double()).tolist()
    nearest = [
        [min(127, floor(abs(each) + 0.5) * (1 if each > 0 else -1)) for each in line] for line in whole
    ]
    assert code.tolist() == nearest


@pytest.mark.parametrize("folder", cases("eetq"), ids=lambda folder: folder.name)
def test_its_owners_codes_come_back_where_a_rows_largest_is_minus_128(folder: Any) -> None:
    """Then the scale of what they mean is the one they have, and nothing is lost twice."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    source = Weights(MemoryStorage(tensors), loader=loader_from_config(config))
    theirs = source.get_weights(next(iter(tensors)).rpartition(".")[0])
    rows = (theirs.codes().codes == 0).any(1)

    ours = quantize(theirs.dequantize())

    assert rows.sum() > 16
    assert_same_bits(ours.codes().codes[rows], theirs.codes().codes[rows])
    assert_same_bits(ours.weight_scales[rows], theirs.fields()["weight_scales"][rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_has_no_scale_is_refused_by_name(value: float) -> None:
    with pytest.raises(
        MismatchError, match=r"a.weight: .*\n  expected finite values\n  got      (nan|inf) at \(0, 2\)"
    ):
        quantize(row(1, 2, value))


def test_a_scale_beyond_half_precision_is_refused() -> None:
    with pytest.raises(CastError, match=r"a.weight_scales: a cast from float32 to float16 overflows"):
        quantize(row(1).float() * 1e7)


@pytest.mark.parametrize("shape", [(32, 64), (64, 96)])
def test_what_fills_no_tile_is_refused_by_name(shape: tuple[int, int]) -> None:
    with pytest.raises(ShapeError, match=r"a.weight: wrong shape\n  expected \(N, K\), both multiples of 64"):
        quantize(torch.ones(shape))


def load(weight: Tensor, rank: Rank | None = None) -> Weights:
    loader = QuantizingLoader(DefaultWeightsLoader(), EETQQuantizer())
    return Weights(MemoryStorage({"a.weight": weight}), loader=loader, process_group=rank)


@pytest.mark.parametrize(
    ("axis", "get"), [(0, Weights.get_weights_col), (1, Weights.get_weights_row)], ids=["N", "K"]
)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_world_size_gives_the_same_model(axis: int, get: Any, world: int) -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).half()

    parts = [get(load(weight, rank), "a") for rank in FakeWorld(world)]

    assert_same_bits(torch.cat([part.dequantize() for part in parts], axis), quantize(weight).dequantize())
    assert all(isinstance(part, EETQWeight) for part in parts)


def test_blocks_of_a_fused_layer_are_quantized_as_the_whole() -> None:
    weight = torch.randn(384, 64, generator=torch.Generator().manual_seed(2)).half()

    parts = [load(weight, rank).get_weights_col_packed("a", (128, 256)) for rank in FakeWorld(2)]

    first, second = quantize(weight).dequantize().split((128, 256))
    for rank, part in enumerate(parts):
        assert_same_bits(part.dequantize(), torch.cat([first.chunk(2)[rank], second.chunk(2)[rank]]))
