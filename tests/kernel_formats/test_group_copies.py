"""Groups of other sizes than Marlin's kernels support, stored as several groups, and restored."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.errors import ArgumentError, RepackError
from qload.kernel_formats import GPTQMarlinConfig, repack, restore
from qload.kernel_formats.marlin import split_group
from qload.layouts import Stored
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.repacking import RepackingLoader
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.example_counts import at_most
from tests.kernels.mp_layers import Case, row_share

LAYOUTS = pytest.mark.parametrize("layout", ["marlin", "strips"])


@pytest.mark.parametrize(
    ("size", "cuts"),
    [
        (-1, (-1, 1)), (32, (32, 1)), (128, (128, 1)), (96, (32, 3)), (192, (64, 3)), (256, (128, 2)),
        (1024, (128, 8)), (160, (32, 5)), (16, None), (48, None), (0, None), (-32, None),
    ],
)  # fmt: skip
def test_a_group_is_split_into_the_largest_supported_groups(size: int, cuts: Any) -> None:
    assert split_group(size) == cuts


@LAYOUTS
@given(data=st.data())
@at_most(40)
def test_every_multiple_of_32_is_repacked_and_restored(layout: str, data: Any) -> None:
    group = 32 * data.draw(st.integers(1, 12))
    case = Case(
        bits=data.draw(st.sampled_from([4, 8])),
        group=group,
        K=32 * data.draw(st.integers(1, 40)),
        N=data.draw(st.sampled_from([8, 64, 72])),
        zeros=data.draw(st.sampled_from([None, Stored()])),
        act_order=data.draw(st.booleans()),
    )
    weight = case.weight()

    packed: Any = repack(weight, layout)

    assert packed.config.group_size in (-1, 32, 64, 128)
    assert_same_bits(packed.dequantize(), weight.dequantize())
    restored = restore(packed)
    assert restored.config == weight.config
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name], tensor)
    again = repack(repack(packed, "exllama"), layout)
    assert again.config == packed.config
    for name, tensor in packed.fields().items():
        assert_same_bits(again.fields()[name], tensor)


@LAYOUTS
def test_the_scales_of_a_group_are_repeated_for_its_kernel_groups(layout: str) -> None:
    weight = Case(group=256, K=640).weight()

    packed: Any = repack(weight, layout)

    assert (packed.config.group_size, packed.config.copies) == (128, 2)
    assert_same_bits(packed.plain_scales(), weight.scales[[0, 0, 1, 1, 2]])


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("place", [0, 1])
def test_a_share_of_an_act_order_keeps_its_groups(place: int) -> None:
    case = Case(group=256, K=1024, act_order=True)
    share = row_share(case, case.weight(), place, 2)

    packed: Any = repack(share, "marlin")

    assert (packed.config.is_k_full, packed.config.copies, packed.scales.shape[0]) == (False, 1, 4)
    assert_same_bits(packed.dequantize(), share.dequantize())
    for name, tensor in restore(packed).fields().items():
        assert_same_bits(tensor, share.fields()[name])
    with pytest.raises(RepackError, match="rows of its groups are on other ranks"):
        repack(share, "strips")


@LAYOUTS
@pytest.mark.parametrize("cut_along", ["get_weights_col", "get_weights_row"])
def test_shares_concatenate_to_the_whole(layout: str, cut_along: str) -> None:
    weight = Case(group=256, K=1024, N=128).weight()
    storage = MemoryStorage({f"a.{name}": tensor for name, tensor in weight.fields().items()})
    loader = RepackingLoader(FormatLoader(ConfiguredFormat(type(weight), weight.config)), layout)

    parts = [
        getattr(Weights(storage, loader=loader, process_group=Rank(i, 2)), cut_along)("a") for i in range(2)
    ]

    assert all(part.config.copies == 2 for part in parts)
    dim = int(cut_along == "get_weights_row")
    assert_same_bits(torch.cat([part.dequantize() for part in parts], dim), weight.dequantize())


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(("size", "copies"), [(128, 0), (128, -1), (-1, 2)])
def test_copies_need_groups_with_a_size(size: int, copies: int) -> None:
    with pytest.raises(ArgumentError, match="marlin: copies\n  expected 1, or more"):
        GPTQMarlinConfig(4, size, copies=copies)
