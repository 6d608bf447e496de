"""compressed-tensors, int-quantized: a byte a code, and whatever shares a scale."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError, CutError, MissingTensorError, ShapeError
from qload.formats import CTIntConfig, CTIntWeight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")


def load(config: CTIntConfig, *layers: dict[str, Tensor], dim: str = "N", rank: Any = None) -> Any:
    named = {f"{i}.{name}": tensor for i, one in enumerate(layers) for name, tensor in one.items()}
    loader = FormatLoader(ConfiguredFormat(CTIntWeight, config))
    weights = Weights(MemoryStorage(named), loader=loader, process_group=rank)
    if len(layers) > 1:
        return weights.get_multi_weights_col([str(i) for i in range(len(layers))])
    return weights.get_weights_row("0") if dim == "K" else weights.get_weights_col("0")


def layer(scale: Tensor, N: int = 2, K: int = 4) -> dict[str, Tensor]:
    return {"weight": (torch.arange(N * K) - 4).reshape(N, K).to(torch.int8), "weight_scale": scale}


def test_dequantize_by_hand() -> None:
    """Asymmetric, a scale and a zero point an output."""
    weight = CTIntWeight(
        config=CTIntConfig((1, -1), symmetric=False),
        weight=torch.tensor([[-128, 0, 127], [1, 2, 3]], dtype=torch.int8),
        weight_scale=torch.tensor([[2], [4]], dtype=torch.float16),
        weight_zero_point=torch.tensor([[1], [-3]], dtype=torch.int8),
    )

    assert weight.dequantize().tolist() == [[2 * (q - 1) for q in (-128, 0, 127)], [16, 20, 24]]


@pytest.mark.parametrize(
    ("block", "scale", "want"),
    [
        pytest.param(None, [3], [[3] * 4] * 2, id="tensor"),
        pytest.param((1, -1), [[3], [5]], [[3] * 4, [5] * 4], id="channel"),
        pytest.param((1, 3), [[3, 5], [7, 9]], [[3, 3, 3, 5], [7, 7, 7, 9]], id="group"),
        pytest.param((2, 2), [[3, 5]], [[3, 3, 5, 5]] * 2, id="block"),
        pytest.param((2, 1), [[3, 5, 7, 9]], [[3, 5, 7, 9]] * 2, id="block of one column"),
    ],
)
def test_what_shares_a_scale(block: Any, scale: Any, want: Any) -> None:
    stored = {"weight": torch.ones(2, 4, dtype=torch.int8), "weight_scale": torch.tensor(scale).half()}

    assert load(CTIntConfig(block), stored).dequantize().tolist() == want


def test_a_block_of_one_column_is_a_group_of_its_own() -> None:
    stored = {"weight": torch.ones(2, 4, dtype=torch.int8), "weight_scale": torch.ones(1, 4).half()}

    groups = load(CTIntConfig((2, 1)), stored).codes().k_group
    assert groups is not None
    assert groups.tolist() == [0, 1, 2, 3]


def test_trap_55_signed_codes_become_unsigned_without_a_change_of_meaning() -> None:
    """Four bits in a byte: -8 is code 0, and every zero point that is not stored is 8."""
    codes = load(CTIntConfig((1, -1), 4), layer(torch.ones(2, 1).half())).codes()

    assert codes.codes.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert codes.zeros is not None
    assert codes.zeros.unique().tolist() == [8]
    assert codes.dequantize().tolist() == [[-4, -3, -2, -1], [0, 1, 2, 3]]


def test_fused_parts_keep_a_scale_each() -> None:
    fused = load(CTIntConfig(None), layer(torch.tensor([1.0])), layer(torch.tensor(2.0), N=1))

    assert fused.weight_scale.tolist() == [1, 2]
    assert fused.dequantize().tolist() == [[-4, -3, -2, -1], [0, 1, 2, 3], [-8, -6, -4, -2]]


def test_a_share_of_fused_parts_keeps_them_too() -> None:
    parts = [layer(torch.tensor([1.0])), layer(torch.tensor([2.0]))]

    share = load(CTIntConfig(None), *parts, rank=Rank(1, 2))

    assert share.dequantize().tolist() == [[0, 1, 2, 3], [0, 2, 4, 6]]


def test_a_row_share_of_groups_takes_its_own_and_one_inside_of_a_group_is_refused() -> None:
    stored = layer(torch.tensor([[1, 2], [4, 8]]).half())

    assert load(CTIntConfig((1, 2)), stored, dim="K", rank=Rank(1, 2)).dequantize().tolist() == [
        [-4, -2],
        [16, 24],
    ]
    with pytest.raises(CutError, match="cuts must be multiples of 2 "):
        load(CTIntConfig((1, 2)), stored, dim="K", rank=Rank(0, 4))


def test_a_seam_inside_of_a_block_is_refused() -> None:
    odd = layer(torch.ones(2, 2).half(), N=3)

    with pytest.raises(CutError, match=r"0\.weight_scale: cannot cut N = 3 at 3\n"):
        load(CTIntConfig((2, 2)), odd, odd)


@pytest.mark.parametrize(
    ("config", "lost"),
    [
        (CTIntConfig((1, -1), symmetric=False), "weight_zero_point"),
        (CTIntConfig((1, -1), static=True), "input_scale"),
    ],
)
def test_what_a_config_promises_has_to_be_there(config: CTIntConfig, lost: str) -> None:
    with pytest.raises(MissingTensorError, match=rf"0\.{lost}: not in the checkpoint"):
        load(config, layer(torch.ones(2, 1).half()))


def test_several_scales_for_one_tensor_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"0\.weight_scale: wrong shape\n  expected \(\) or \(1,\)"):
        load(CTIntConfig(None), layer(torch.ones(3)))


@pytest.mark.parametrize(
    ("block", "bits"), [((1, -1), 1), ((1, -1), 9), ((0, 4), 8), ((1, 0), 8), ((1, -2), 8)]
)
def test_bits_and_blocks_there_are_none_of_are_refused(block: tuple[int, int], bits: int) -> None:
    with pytest.raises(ArgumentError, match=r"ct_int: (bits|block)"):
        CTIntConfig(block, bits)


def test_a_zero_point_is_taken_away_from_codes_of_few_bits_too() -> None:
    stored = {
        "weight": torch.tensor([[-8, 0, 7]], dtype=torch.int8),
        "weight_scale": torch.tensor([[0.5]]),
        "weight_zero_point": torch.tensor([[5]], dtype=torch.int8),
    }

    weight = load(CTIntConfig((1, -1), bits=4, symmetric=False), stored)

    assert weight.dequantize().tolist() == [[-6.5, -2.5, 1.0]]
