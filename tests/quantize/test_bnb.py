"""Plain layers to bitsandbytes: the owner's bits, ties by hand, the same model at every world size."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qload.detect import DefaultWeightsLoader
from qload.errors import ArgumentError, CastError, CutError, MismatchError
from qload.parallel import FakeWorld, Rank
from qload.quantize import BNB4Quantizer, BNBInt8Quantizer, QuantizingLoader
from qload.spec import Layer
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.paths import FIXTURES

pytestmark = pytest.mark.usefixtures("seen_texts")

OWNER = load_file(FIXTURES / "bnb" / "quantized_33x65" / "quantized.safetensors")
EVERY = [BNB4Quantizer("nf4", 4), BNB4Quantizer("fp4", 4, double_quant=True), BNBInt8Quantizer()]


def quantized(quantizer: Any, weight: Tensor) -> Any:
    N, K = weight.shape
    return quantizer.quantize(weight, Layer((N,), K, (N, K), "a"), weight.dtype)


def weights(quantizer: Any, rank: Rank | None = None, **layers: Tensor) -> Weights:
    loader = QuantizingLoader(DefaultWeightsLoader(), quantizer)
    storage = MemoryStorage({f"{name}.weight": tensor for name, tensor in layers.items()})
    return Weights(storage, loader=loader, process_group=rank)


def noise(N: int, K: int, seed: int = 0) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "quantizer"),
    [
        ("nf4", BNB4Quantizer("nf4", 32)),
        ("nf4_nested", BNB4Quantizer("nf4", 32, double_quant=True)),
        ("fp4", BNB4Quantizer("fp4", 64)),
        ("fp4_nested", BNB4Quantizer("fp4", 64, double_quant=True)),
    ],
)
def test_codes_and_scales_are_the_owners_bit_for_bit(name: str, quantizer: BNB4Quantizer) -> None:
    """An odd count of elements, a short last block, blocks of zeros, an outlier."""
    weight = quantized(quantizer, OWNER["plain.weight"])

    assert_same_bits(weight.weight, OWNER[f"{name}.weight"])
    assert_same_bits(weight.absmax, OWNER[f"{name}.absmax"])


def test_int8_is_the_owners_bit_for_bit() -> None:
    weight = quantized(BNBInt8Quantizer(), OWNER["plain.weight"])

    assert_same_bits(weight.weight, OWNER["int8.weight"])
    assert_same_bits(weight.SCB, OWNER["int8.SCB"])


@pytest.mark.parametrize(
    ("kind", "values", "codes"),
    [
        pytest.param("fp4", [8, 12, 4, 6, 2, 3, -8, -12], [2, 3, 4, 5, 6, 7, 10, 11], id="entries"),
        pytest.param("fp4", [12, 10, 7, 5, 3.5, 2.5, -10, -7], [3, 2, 5, 4, 7, 6, 11, 10], id="ties go down"),
        pytest.param("fp4", [12, 0, -0.0, 0.01, -0.01, 0.05, -0.05, 1], [3, 0, 0, 8, 0, 1, 9, 1], id="zeros"),
        pytest.param("nf4", [1, -1, 0, 0.08, -0.09, 0.72, -0.7, 0.44], [15, 0, 7, 8, 6, 14, 1, 12], id="nf4"),
    ],
)
def test_a_code_is_the_nearest_entry(kind: Any, values: list[float], codes: list[int]) -> None:
    weight = quantized(BNB4Quantizer(kind, 8), torch.tensor([values]))

    assert weight.codes().plain().tolist() == [codes]


def test_int8_rounds_half_to_even() -> None:
    """With a largest value of 127, codes are the weights, rounded."""
    weight = quantized(BNBInt8Quantizer(), torch.tensor([[127, 0.5, 1.5, -0.5, -2.5], [0.0] * 5]))

    assert weight.weight.tolist() == [[127, 0, 2, 0, -2], [0] * 5]
    assert weight.SCB.tolist() == [127, 0]


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_what_a_quantized_weight_means_is_quantized_to_itself(kind: Any) -> None:
    first = quantized(BNB4Quantizer(kind, 16), noise(5, 24))

    again = quantized(BNB4Quantizer(kind, 16), first.dequantize())

    assert_same_bits(again.dequantize(), first.dequantize())


@pytest.mark.parametrize("quantizer", EVERY, ids=lambda quantizer: quantizer.format)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_world_size_gives_the_same_model(quantizer: Any, world: int) -> None:
    q, k = noise(16, 16), noise(8, 16, seed=1)
    a, b = (quantized(quantizer, weight).dequantize() for weight in (q, k))
    for rank in FakeWorld(world):
        load = weights(quantizer, rank, q=q, k=k)
        fused = torch.cat([one.chunk(world)[rank.rank()] for one in (a, b)])

        assert_same_bits(load.get_multi_weights_col(["q", "k"]).dequantize(), fused)
        assert_same_bits(load.get_weights_row("q").dequantize(), a.chunk(world, 1)[rank.rank()])
        assert load.get_weights_col("q").format == quantizer.format


def test_a_cut_inside_a_block_is_refused_as_in_a_checkpoint() -> None:
    with pytest.raises(CutError, match=r"q\.weight\.absmax: cannot cut K = 12 at 6"):
        weights(BNB4Quantizer("nf4", 4), Rank(0, 2), q=noise(4, 12)).get_weights_row("q")


def test_layers_of_different_inputs_do_not_fuse() -> None:
    layers = {"q": noise(8, 16), "k": noise(16, 8)}

    with pytest.raises(MismatchError):
        weights(BNB4Quantizer("nf4", 4), None, **layers).get_multi_weights_col(["q", "k"])


@pytest.mark.parametrize("quantizer", EVERY, ids=lambda quantizer: quantizer.format)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_has_no_scale_is_refused(quantizer: Any, value: float) -> None:
    with pytest.raises(MismatchError, match=r"a\.weight: cannot be quantized"):
        quantized(quantizer, torch.tensor([[1.0, value]]))


def test_int8_refuses_what_fp16_cannot_hold() -> None:
    with pytest.raises(
        CastError, match=r"a\.weight: a cast from float32 to float16 overflows\n  got      70000"
    ):
        quantized(BNBInt8Quantizer(), torch.tensor([[1.0, 70000.0]]))


@pytest.mark.parametrize(("kind", "blocksize"), [("nf8", 64), ("nf4", 0), ("fp4", -1)])
def test_settings_that_mean_nothing_are_refused(kind: Any, blocksize: int) -> None:
    with pytest.raises(ArgumentError, match=r"quant_type|blocksize"):
        BNB4Quantizer(kind, blocksize)
