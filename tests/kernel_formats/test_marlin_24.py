"""Marlin checkpoints, dense and 2:4, as GPTQ and back: by hand, in shares, and refusals."""

from typing import Any

import pytest
import torch

from qload.errors import RepackError
from qload.formats import GPTQWeight, Marlin24Config, Marlin24Weight, MarlinConfig, MarlinWeight
from qload.kernel_formats import repack, restore
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.kernel_formats.marlin_layers import layer

pytestmark = pytest.mark.usefixtures("seen_texts")

COUNT = torch.arange(64)  # stored scales, in the checkpoint's order


def checkpoint(weight_type: type[MarlinWeight | Marlin24Weight], K: int, group: int) -> Any:
    """Build a layer of random codes; 2:4 keeps the first and the third of four rows."""
    noise = torch.Generator().manual_seed(K)
    words = torch.randint(-(2**31), 2**31, (K // 16, 128), generator=noise).int()
    scales = (COUNT + 100 * torch.arange(K // group)[:, None]).half()
    if weight_type is MarlinWeight:
        return MarlinWeight(config=MarlinConfig(group), B=words, s=scales)
    # No code is 8: packers choose by rule which codes of weight 0 they keep.
    words = words[::2] | 0x11111111
    meta = torch.full((K // 32, 128), -0x7778, dtype=torch.int16)
    return Marlin24Weight(config=Marlin24Config(group), B_24=words, B_meta=meta, s=scales)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "exllama", "marlin", "awq"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    "weight_type", [MarlinWeight, Marlin24Weight], ids=lambda weight_type: weight_type.format
)
def test_a_row_share_of_a_checkpoint_is_restored_bit_for_bit(
    weight_type: type[MarlinWeight | Marlin24Weight], world: int, layout: str
) -> None:
    """With four ranks each has one group, in the checkpoint's order for groups."""
    whole = checkpoint(weight_type, 128, 32)
    tensors = {f"a.{name}": tensor for name, tensor in whole.fields().items()}
    loader = FormatLoader(ConfiguredFormat(weight_type, whole.config))
    for rank in FakeWorld(world):
        share = Weights(MemoryStorage(tensors), loader=loader, process_group=rank).get_weights_row("a")

        packed = repack(share, layout)

        assert_same_bits(packed.dequantize(), share.dequantize())
        assert restore(packed).config == share.config
        for name, tensor in share.fields().items():
            assert_same_bits(restore(packed).fields()[name], tensor)


def test_2_of_4_by_hand() -> None:
    """Code 9 in rows 1 and 2 of every four, 8 in the others: the metadata keeps 1 and 2."""
    weight = layer(32, 64, -1)
    weight.qweight.fill_(-0x76677668)  # 0x89988998

    packed = repack(weight, "marlin_24").fields()

    assert packed["B_24"].unique().tolist() == [-0x66666667]
    assert packed["B_meta"].unique().tolist() == [-0x6667]


def holding(weight: GPTQWeight, word: int) -> GPTQWeight:
    weight.qweight.fill_(word)
    return weight


PAIR = -0x77667767  # 0x88998899: weight 1 in two of every four rows
THREE = -0x76667667  # 0x89998999: weight 1 in three of every four rows


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        pytest.param(holding(layer(32, 64, -1), THREE), "more than two of four", id="three of four"),
        pytest.param(holding(layer(16, 64, -1), PAIR), "of 32, 64; got 16, 64", id="rows"),
        pytest.param(holding(layer(32, 8, -1), PAIR), "of 32, 64; got 32, 8", id="columns"),
        pytest.param(layer(32, 64, -1, bits=2), "needs 4 or 8 bits, got 2", id="bits"),
        pytest.param(holding(layer(64, 64, 32, act=True), PAIR), "not in order along K", id="act order"),
        pytest.param(holding(layer(32, 64, -1, sym=False), PAIR), "a zero point is not 8", id="zero points"),
        pytest.param(
            holding(layer(32, 64, -1, scales=torch.float32), PAIR), "bfloat16, got float32", id="scales"
        ),
    ],
)
def test_a_weight_beyond_2_of_4_is_refused_with_the_reason(weight: GPTQWeight, reason: str) -> None:
    with pytest.raises(RepackError, match=reason):
        repack(weight, "marlin_24")


def test_metadata_with_other_codes_of_0_than_packers_keep_is_refused_for_gptq() -> None:
    """Only row 0 of four is nonzero: packers keep it and row 2, this file keeps rows 0 and 1."""
    weight: Any = repack(holding(layer(32, 64, -1), -0x77767777), "marlin_24")  # 0x88898889
    assert weight.B_meta.unique().tolist() == [-0x7778]
    weight.B_meta.fill_(0x4444)

    with pytest.raises(
        RepackError, match="keeps another code of weight 0 than packers do, first at kept row 1"
    ):
        repack(weight, "gptq")
