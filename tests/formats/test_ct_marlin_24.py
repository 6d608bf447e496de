"""Marlin 2:4 as compressed-tensors writes it: its names, and its rule for which scales are permuted."""

import pytest
import torch

from qload.formats import Marlin24Config, Marlin24Weight
from qload.kernel_formats import repack, restore
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights

PERMUTED = [0, 4, 1, 5, 2, 6, 3, 7]  # the column of each of the first scales, in the order for groups


def weights(K: int, group: int, *, compressed: bool = True, rank: Rank | None = None) -> Weights:
    """Every kept code is one more than the zero point, and the scales of each group count up."""
    names = ("weight_packed", "meta", "scale_packed") if compressed else ("B_24", "B_meta", "s")
    tensors = (
        torch.full((K // 32, 128), 0x99999999 - (1 << 32), dtype=torch.int32),
        torch.full((K // 32, 128), 0x4444, dtype=torch.int16),
        (torch.arange(64) + 100 * torch.arange(K // group)[:, None]).half(),
    )
    stored = {f"a.{name}": tensor for name, tensor in zip(names, tensors, strict=True)}
    weight_type = ConfiguredFormat(Marlin24Weight, Marlin24Config(group, compressed=compressed))
    return Weights(MemoryStorage(stored), loader=FormatLoader(weight_type), process_group=rank)


@pytest.mark.parametrize(
    ("K", "compressed", "permuted"),
    [
        pytest.param(96, True, True, id="three groups"),
        pytest.param(64, True, False, id="two groups, as compressed-tensors writes them"),
        pytest.param(64, False, True, id="two groups, as others do"),
    ],
)
def test_scales_are_permuted_for_groups_of_less_than_half_of_the_inputs(
    K: int, compressed: bool, permuted: bool
) -> None:
    weight = weights(K, 32, compressed=compressed).get_weights("a")

    columns = PERMUTED if permuted else list(range(8))
    assert weight.dequantize()[columns, 32].tolist() == list(range(100, 108))


def test_a_share_keeps_the_order_of_the_whole() -> None:
    share = weights(64, 32, rank=Rank(1, 2)).get_weights_row("a")

    assert share.shape == (64, 32)
    assert share.dequantize()[:4, 0].tolist() == [100, 101, 102, 103]


@pytest.mark.parametrize("K", [64, 96])
def test_what_was_repacked_goes_back_to_its_own_order(K: int) -> None:
    weight = weights(K, 32).get_weights("a")

    back = restore(repack(weight, "marlin"))

    assert back.config == weight.config
    for name, tensor in weight.fields().items():
        assert_same_bits(back.fields()[name], tensor)
