"""pack-quantized with one scale for the tensor, whose zero point is a number of its own."""

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError, MismatchError, MissingTensorError, ShapeError
from qload.formats import CTPackTensorConfig, CTPackTensorWeight
from qload.layouts import compressed_tensors
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

CODES = torch.tensor([[0, 8, 15, 7, 1, 9, 8, 8, 3]])


def layer(
    codes: Tensor = CODES, bits: int = 4, zero: int | None = -3, dense: bool = True
) -> dict[str, Tensor]:
    zeros = {} if zero is None else {"weight_zero_point": torch.tensor([zero], dtype=torch.int8)}
    return zeros | {
        "weight_packed": compressed_tensors.pack(codes.int(), bits, dense),
        "weight_scale": torch.tensor([0.5], dtype=torch.bfloat16),
        "weight_shape": torch.tensor(codes.shape),
    }


def weights(
    *layers: dict[str, Tensor], config: CTPackTensorConfig | None = None, rank: object = None
) -> Weights:
    named = {f"{i}.{name}": tensor for i, one in enumerate(layers) for name, tensor in one.items()}
    made = config or CTPackTensorConfig(4, symmetric=False)
    loader = FormatLoader(ConfiguredFormat(CTPackTensorWeight, made))
    return Weights(MemoryStorage(named), loader=loader, process_group=rank)  # type: ignore[arg-type]


@pytest.mark.parametrize(("zero", "moved"), [(-3, 3), (None, 0), (7, -7)])
def test_dequantize_by_hand(zero: int | None, moved: int) -> None:
    """Codes count from -8 on, and the zero point as it is stored is taken from that."""
    config = CTPackTensorConfig(4, symmetric=zero is None)

    got = weights(layer(zero=zero), config=config).get_weights("0").dequantize()
    assert got.tolist() == [[(code - 8 + moved) / 2 for code in CODES[0].tolist()]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_fused_parts_keep_a_scale_and_a_zero_point_each(order: tuple[int, int]) -> None:
    parts = [
        layer(CODES.repeat(2, 1)),
        {**layer(CODES.flip(1), zero=2), "weight_scale": torch.tensor([2.0], dtype=torch.bfloat16)},
    ]

    parts = [parts[at] for at in order]
    fused = weights(*parts).get_multi_weights_col(["0", "1"]).dequantize()
    assert torch.equal(fused, torch.cat([weights(part).get_weights("0").dequantize() for part in parts]))


def test_layers_of_other_sizes_are_quantized_alike() -> None:
    assert CTPackTensorConfig(4, shape=(2, 9)) == CTPackTensorConfig(4, shape=(1, 9))


def test_shares_are_the_whole() -> None:
    codes = torch.arange(4 * 32).reshape(4, 32) % 16
    stored, whole = layer(codes), weights(layer(codes)).get_weights("0").dequantize()

    for dim, load in ((0, Weights.get_weights_col), (1, Weights.get_weights_row)):
        parts = [load(weights(stored, rank=rank), "0").dequantize() for rank in FakeWorld(4)]
        assert torch.equal(torch.cat(parts, dim), whole)


@pytest.mark.parametrize("dense", [True, False])
def test_the_packing_of_odd_bits_is_told_by_shapes(dense: bool) -> None:
    codes = torch.arange(2 * 64).reshape(2, 64) % 8
    config = CTPackTensorConfig(3)

    weight = weights(layer(codes, 3, None, dense), config=config).get_weights("0")
    assert (weight.config.dense, weight.dequantize().tolist()) == (dense, ((codes - 4) / 2).tolist())


def test_two_packings_that_fit_need_the_version() -> None:
    stored = layer(torch.arange(12)[None] % 8, 3, None, dense=True)

    with pytest.raises(MismatchError, match="two packings of 3 bits fit its shape"):
        weights(stored, config=CTPackTensorConfig(3)).get_weights("0")
    read = weights(stored, config=CTPackTensorConfig(3, dense=True)).get_weights("0")
    assert read.dequantize().tolist() == [[(i % 8 - 4) / 2 for i in range(12)]]


@pytest.mark.parametrize(
    ("name", "tensor", "error"),
    [
        ("weight_scale", torch.ones(2, dtype=torch.bfloat16), ShapeError),
        ("weight_zero_point", torch.zeros(2, dtype=torch.int8), ShapeError),
        ("weight_shape", torch.tensor([2, 9]), MismatchError),
        ("weight_shape", torch.tensor([1, 17]), ShapeError),
        ("weight_zero_point", None, MissingTensorError),
    ],
)
def test_what_contradicts_is_refused(name: str, tensor: Tensor | None, error: type[Exception]) -> None:
    changed = {**layer(), name: tensor}

    with pytest.raises(
        error, match=rf"0\.{'weight_packed' if error is ShapeError and name == 'weight_shape' else name}"
    ):
        weights({key: each for key, each in changed.items() if each is not None}).get_weights("0")


def test_bits_that_no_code_has_are_refused() -> None:
    with pytest.raises(ArgumentError, match="ct_pack_tensor: bits"):
        CTPackTensorConfig(9)
