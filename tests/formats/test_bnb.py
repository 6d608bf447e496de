"""bitsandbytes: blocks small enough to check in your head, cuts between blocks, fused layers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.dtypes import STORED
from qload.errors import CutError, DtypeError, MismatchError, MissingTensorError, UnsupportedFormatError
from qload.formats import BNB4Config, BNBConfig, BNBFP4Weight, BNBNF4Weight, BNBWeight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.formats.bnb_layers import layer, nested, weights, whole

pytestmark = pytest.mark.usefixtures("seen_texts")

FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]  # twelfths


def test_dequantize_by_hand() -> None:
    """The first of two codes is in the high bits; blocks of 4 end within rows of 3; the last is short."""
    weight = whole(layer(3, 3, 4))

    assert weight.weight.flatten().tolist() == [0x01, 0x23, 0x45, 0x67, 0x89]  # of the last, 8 alone counts
    assert weight.dequantize().tolist() == [[0, 1, 2], [3, 40, 50], [60, 70, 800]]


def test_blocks_that_end_with_rows_by_hand() -> None:
    weight = whole(layer(2, 4, 2))

    assert weight.dequantize().tolist() == [[0, 1, 20, 30], [400, 500, 6000, 7000]]
    assert tuple(weight.codes().scales.shape) == (2, 2)


def test_fp4_by_hand() -> None:
    tensors = layer(1, 16, 16, kind="fp4")
    tensors["a.weight.quant_map"] = torch.tensor(FP4) / 12
    tensors["a.weight.absmax"].fill_(12)

    weight = whole(tensors)

    assert weight.dequantize().tolist() == [FP4]
    assert (type(weight), weight.config.quant_type) == (BNBFP4Weight, "fp4")


def test_int8_by_hand() -> None:
    weight = BNBWeight(
        config=BNBConfig(),
        weight=torch.tensor([[127, -64], [1, 0]], dtype=torch.int8),
        SCB=torch.tensor([127.0, 254.0]),
    )

    assert weight.dequantize().tolist() == [[127, -64], [2, 0]]


def test_int8_rounds_the_product_with_the_scale_first() -> None:
    """29 * (0.7 / 127) and 29 * 0.7 / 127 are one ulp more."""
    codes = torch.tensor([[29]], dtype=torch.int8)

    weight = BNBWeight(config=BNBConfig(), weight=codes, SCB=torch.tensor([0.7]))

    assert weight.dequantize().item() == 0.15984250605106354


def test_quantized_scales_by_hand() -> None:
    """Scale 4 is in the second run: 4 * 1000 + 0.5."""
    weight = whole(nested(2, 4, 2))

    assert weight.dequantize().tolist() == [[1.5, 1.5, 2.5, 2.5], [3.5, 3.5, 4000.5, 4000.5]]
    assert weight.absmax.dtype == torch.float32


def test_a_run_of_scales_is_counted_in_the_whole_layer() -> None:
    columns = [weights(nested(2, 4, 2), rank).get_weights_col("a") for rank in FakeWorld(2)]
    rows = [weights(nested(2, 4, 2), rank).get_weights_row("a") for rank in FakeWorld(2)]

    assert [share.absmax.tolist() for share in columns] == [[1.5, 2.5], [3.5, 4000.5]]
    assert [share.absmax.tolist() for share in rows] == [[1.5, 3.5], [2.5, 4000.5]]


@pytest.mark.parametrize("storage", [torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_codes_may_be_stored_as_another_dtype(storage: torch.dtype) -> None:
    tensors = layer(4, 8, 4)
    want = whole(tensors).dequantize()
    tensors["a.weight"] = tensors["a.weight"].flatten().view(storage)[:, None]

    weight = weights(tensors).get_weights("a")

    assert_same_bits(weight.dequantize(), want)
    assert weight.weight.dtype == storage
    assert weight.config.storage is STORED[storage]


@pytest.mark.parametrize("make", [layer, nested])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_five_loads_take_a_share_of_what_the_whole_means(make: Any, world: int) -> None:
    tensors = {**make(8, 16, 4, prefix="a"), **make(16, 16, 4, prefix="b")}
    a, b = (whole(tensors, prefix).dequantize() for prefix in "ab")
    for rank in FakeWorld(world):
        load = weights(tensors, rank)
        mine = [one.chunk(world)[rank.rank()] for one in (a, b, *b.split([12, 4]))]

        assert_same_bits(load.get_weights("a").dequantize(), a)
        assert_same_bits(load.get_weights_col("a").dequantize(), mine[0])
        assert_same_bits(load.get_weights_row("a").dequantize(), a.chunk(world, 1)[rank.rank()])
        assert_same_bits(load.get_multi_weights_col(["a", "b"]).dequantize(), torch.cat(mine[:2]))
        assert_same_bits(load.get_weights_col_packed("b", [12, 4]).dequantize(), torch.cat(mine[2:]))
        assert load.report().unused == []


@pytest.mark.parametrize(
    ("tensors", "dim", "world", "lawful"),
    [
        pytest.param(layer(8, 3, 4), "col", 2, True, id="12 elements are 3 blocks"),
        pytest.param(layer(8, 3, 4), "col", 4, False, id="6 elements are no blocks"),
        pytest.param(layer(12, 1, 3), "col", 2, True, id="6 elements are blocks and bytes"),
        pytest.param(layer(12, 1, 3), "col", 4, False, id="3 elements are no bytes"),
        pytest.param(layer(2, 8, 4), "row", 2, True, id="blocks end with rows"),
        pytest.param(layer(2, 8, 4), "row", 4, False, id="inside a block"),
        pytest.param(layer(2, 12, 8), "row", 2, False, id="blocks do not end with rows"),
        pytest.param(layer(4, 9, 3), "row", 3, False, id="bytes do not end with rows"),
    ],
)
def test_a_cut_is_lawful_between_whole_blocks_of_whole_bytes(
    tensors: dict[str, Tensor], dim: str, world: int, lawful: bool
) -> None:
    want = whole(tensors).dequantize()
    loads = {"col": Weights.get_weights_col, "row": Weights.get_weights_row}
    for rank in FakeWorld(world):
        if lawful:
            share = loads[dim](weights(tensors, rank), "a").dequantize()
            assert_same_bits(share, want.chunk(world, 0 if dim == "col" else 1)[rank.rank()])
        else:
            with pytest.raises(CutError, match=r"a\.weight(\.absmax)?: cannot cut"):
                loads[dim](weights(tensors, rank), "a")


def test_bytes_stored_as_wider_words_are_cut_between_words() -> None:
    tensors = layer(4, 2, 2)
    tensors["a.weight"] = tensors["a.weight"].flatten().view(torch.bfloat16)[:, None]

    share = weights(tensors, Rank(1, 2)).get_weights_col("a")

    assert share.dequantize().tolist() == [[400, 500], [6000, 7000]]
    with pytest.raises(CutError, match=r"as weight is \(\(NK\)/2\^/2, 1\)"):
        weights(tensors, Rank(1, 4)).get_weights_col("a")


def test_fused_layers_keep_the_scales_that_each_was_given() -> None:
    tensors = {**nested(4, 2, 2, prefix="q"), **nested(2, 2, 2, prefix="k", offset=0.25)}

    fused = weights(tensors).get_multi_weights_col(["q", "k"])

    assert fused.absmax.tolist() == [1.5, 2.5, 3.5, 4000.5, 1.25, 2.25]
    assert fused.dequantize()[:, 0].tolist() == fused.absmax.tolist()


def test_a_seam_inside_a_block_is_refused() -> None:
    tensors = {**layer(3, 3, 4, prefix="q"), **layer(4, 3, 4, prefix="k")}

    assert weights(tensors).get_multi_weights_col(["k", "q"]).shape == (7, 3)
    with pytest.raises(CutError, match=r"q\.weight\.absmax: cannot cut N = 3 at 3"):
        weights(tensors).get_multi_weights_col(["q", "k"])


def test_layers_of_two_types_or_block_sizes_do_not_fuse() -> None:
    tensors = {**layer(4, 4, 4), **layer(4, 4, 2, prefix="b"), **layer(4, 4, 4, prefix="c", kind="fp4")}

    with pytest.raises(MismatchError, match="blocksize = 2"):
        weights(tensors).get_multi_weights_col(["a", "b"])
    with pytest.raises(MismatchError, match="differ in format"):
        weights(tensors).get_multi_weights_col(["a", "c"])


def test_a_weight_made_by_hand_says_k_and_has_its_scales_in_float32() -> None:
    loaded = whole(nested(3, 4, 2))

    made = BNBNF4Weight(config=BNB4Config("nf4", 2, K=4), **loaded.fields())

    assert_same_bits(made.dequantize(), loaded.dequantize())
    with pytest.raises(DtypeError, match=r"BNBNF4Weight\.absmax: wrong dtype\n  expected float32"):
        BNBNF4Weight(config=made.config, **{**made.fields(), "absmax": made.absmax.byte()})


@pytest.mark.parametrize("value", [0, 1, 3, 9])
def test_int8_in_the_order_of_a_kernel_is_refused(value: int) -> None:
    tensors = {"a.weight": torch.ones(2, 4).to(torch.int8), "a.SCB": torch.ones(2)}
    tensors["a.weight_format"] = torch.tensor(value, dtype=torch.uint8)
    load = Weights(MemoryStorage(tensors), loader=FormatLoader(ConfiguredFormat(BNBWeight, BNBConfig())))

    if value:
        with pytest.raises(UnsupportedFormatError, match=f"weight_format is {value}"):
            load.get_weights("a")
    else:
        assert load.get_weights("a").shape == (2, 4)
        assert load.report().complete


def test_codes_without_their_state_are_named() -> None:
    tensors = layer(4, 4, 4)
    del tensors["a.weight.quant_state.bitsandbytes__nf4"]

    with pytest.raises(MissingTensorError, match=r"a\.weight\.quant_state\.bitsandbytes__nf4: not in"):
        whole(tensors)
