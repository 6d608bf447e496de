"""GPTQ: blocks small enough to check in your head, and what the format's own tools wrote."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.detect import GPTQWeightsLoader
from qload.errors import AmbiguousIndexError, ArgumentError, MissingTensorError, ShapeError
from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats import repack, restore
from qload.layouts import STORED_MINUS_ONE, Stored, StoredMinusOneUnmasked, ZeroPoints
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

V2 = Stored()


def words(*values: int) -> Tensor:
    """32-bit words, written without a sign."""
    return torch.tensor([value - (1 << 32) if value >> 31 else value for value in values], dtype=torch.int32)


def gptq(
    bits: int, qweight: Tensor, qzeros: Tensor, *, zeros: ZeroPoints = V2, groups: int = 1
) -> GPTQWeight:
    """A layer of scale 2, one group unless there are more rows of zero points."""
    K, N = qweight.shape[0] * 32 // bits, qweight.shape[1]
    return GPTQWeight(
        config=GPTQConfig(bits, K // groups if groups > 1 else -1, zeros),
        qweight=qweight,
        qzeros=qzeros,
        scales=torch.full((groups, N), 2, dtype=torch.float16),
        g_idx=torch.arange(K, dtype=torch.int32) // (K // groups),
    )


def test_four_bits_by_hand() -> None:
    """Every column holds the codes 0..7; zero points 1..8 are stored as 0..7; the scale is 2."""
    weight = gptq(4, words(0x76543210).repeat(8)[None], words(0x76543210)[None], zeros=STORED_MINUS_ONE)

    assert weight.dequantize().tolist() == [[2 * (k - (n + 1)) for k in range(8)] for n in range(8)]


def test_gptq_v2_stores_the_zero_point_itself() -> None:
    weight = gptq(4, words(0x76543210).repeat(8)[None], words(0x76543210)[None])

    assert weight.dequantize().tolist() == [[2 * (k - n) for k in range(8)] for n in range(8)]


def test_the_highest_code_of_a_word_is_not_a_sign() -> None:
    weight = gptq(4, words(0xFEDCBA98).repeat(8)[None], words(0)[None])

    assert weight.dequantize()[0].tolist() == [2 * code for code in range(8, 16)]


def test_two_bits_by_hand() -> None:
    """0b11100100 is the codes 0, 1, 2, 3, four times over; zero points 3, 2, 1, 0, ... as stored."""
    weight = gptq(2, words(0xE4E4E4E4).repeat(16)[None], words(0x1B1B1B1B)[None])

    assert weight.dequantize()[1].tolist() == [2 * (k % 4 - 2) for k in range(16)]
    assert weight.dequantize()[:4, 0].tolist() == [-6, -4, -2, 0]


def test_eight_bits_by_hand() -> None:
    weight = gptq(8, words(0xFF80017F).repeat(4)[None], words(0x80808080)[None])

    assert weight.dequantize()[3].tolist() == [-2, -254, 0, 254]


def test_three_bit_codes_straddle_words() -> None:
    """Code 10 is bits 30 to 32 and code 21 bits 63 to 65 of the three words: 0b101 there, 0 elsewhere."""
    column = words(1 << 30, (1 << 0) | (1 << 31), 1 << 1)

    weight = gptq(3, column[:, None].repeat(1, 32), words(0, 0, 0)[None])

    assert {k: v for k, v in enumerate(weight.dequantize()[7].tolist()) if v} == {10: 10, 21: 10}


@pytest.mark.parametrize(
    ("zeros", "first", "second"),
    [
        pytest.param(STORED_MINUS_ONE, 0, 8, id="the writer's reading: the borrow came from the next field"),
        pytest.param(StoredMinusOneUnmasked(), 16, 7, id="unmasked: 15 + 1, and the next field as it is"),
    ],
)
def test_a_zero_point_of_zero_has_two_readings(zeros: ZeroPoints, first: int, second: int) -> None:
    """Zero points 0, 8, 8, ... minus 0x11111111 are 0x7777776F."""
    weight = gptq(4, words(*[0] * 8)[None], words(0x7777776F)[None], zeros=zeros)

    assert weight.dequantize()[:3, 0].tolist() == [-2 * first, -2 * second, -2 * 8]


def test_three_bit_zero_points_wrap_field_by_field() -> None:
    weight = gptq(
        3, torch.zeros(3, 32, dtype=torch.int32), words(0x7 | 0x3 << 3, 0, 0)[None], zeros=STORED_MINUS_ONE
    )

    assert weight.dequantize()[:3, 0].tolist() == [0, -8, -2]


def test_act_order_takes_the_scale_of_the_rows_group() -> None:
    weight = gptq(4, words(0x11111111, 0x11111111)[:, None].repeat(1, 8), words(0, 0)[:, None], groups=2)
    weight.scales[1] = 16
    weight.g_idx.copy_(torch.tensor([0, 1] * 8))

    assert weight.dequantize()[0].tolist() == [2, 16] * 8


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
def test_index_and_scales_come_in_several_dtypes(dtype: torch.dtype, scales: torch.dtype) -> None:
    weight = gptq(4, words(0x11111111, 0x22222222)[:, None].repeat(1, 8), words(0, 0)[:, None], groups=2)

    other = GPTQWeight(
        config=weight.config, qweight=weight.qweight, qzeros=weight.qzeros,
        scales=weight.scales.to(scales), g_idx=weight.g_idx.to(dtype),
    )  # fmt: skip

    assert torch.equal(other.dequantize(), weight.dequantize())


def test_an_index_of_zeros_over_several_groups_is_refused() -> None:
    weight = gptq(4, torch.zeros(4, 8, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32), groups=2)

    with pytest.raises(AmbiguousIndexError, match="g_idx: all zero, with two readings"):
        GPTQWeight(config=weight.config, **{**weight.fields(), "g_idx": weight.g_idx * 0})


def two_groups(*left_out: str, **changes: Tensor) -> MemoryStorage:
    """Codes 0 to 7 over and over, zero points of 1, and scales 2 and 16."""
    weight = gptq(4, words(0x76543210).repeat(2, 8), words(0x11111111).repeat(2, 1), groups=2)
    weight.scales[1] = 16
    named = {f"a.{name}": tensor for name, tensor in {**weight.fields(), **changes}.items()}
    return MemoryStorage({name: tensor for name, tensor in named.items() if name[2:] not in left_out})


def load(storage: MemoryStorage, desc_act: bool | None, bits: int = 4, rank: Any = None) -> Weights:
    loader = GPTQWeightsLoader(bits=bits, group_size=8, zeros=V2, desc_act=desc_act)
    return Weights(storage, loader=loader, process_group=rank)


@pytest.mark.parametrize("desc_act", [None, False])
def test_without_an_index_the_groups_lie_in_order(desc_act: bool | None) -> None:
    """Whole, shared, repacked and restored; and nothing but a note differs from a layer with its index."""
    indexed = load(two_groups(), desc_act).get_weights("a")
    weights = load(two_groups("g_idx"), desc_act)

    weight = weights.get_weights("a")

    assert (weight.g_idx, weight.config) == (None, indexed.config)
    assert_same_bits(weight.dequantize(), indexed.dequantize())
    assert weights.report().notes == ("a: g_idx is not stored: the groups are in order",)
    assert weights.report().complete
    back = restore(repack(weight, "exllama"))
    assert (back.g_idx, set(back.fields())) == (None, set(weight.fields()))
    assert_same_bits(back.dequantize(), indexed.dequantize())
    shares = [load(two_groups("g_idx"), desc_act, rank=rank).get_weights_row("a") for rank in FakeWorld(2)]
    assert_same_bits(torch.cat([share.dequantize() for share in shares], 1), indexed.dequantize())
    assert [share.scales.shape[0] for share in shares] == [1, 1]


def test_without_an_index_act_order_cannot_be_read() -> None:
    with pytest.raises(MissingTensorError, match=r"a\.g_idx"):
        load(two_groups("g_idx"), desc_act=True).get_weights("a")


def test_an_index_of_zeros_is_in_order_where_the_config_denies_act_order() -> None:
    zeros = two_groups(g_idx=torch.zeros(16, dtype=torch.int32))
    weights = load(zeros, desc_act=False)

    weight = weights.get_weights("a")

    assert weight.g_idx is None
    assert_same_bits(weight.dequantize(), load(two_groups(), desc_act=False).get_weights("a").dequantize())
    assert weights.report().complete
    assert weights.report().notes == ("a: g_idx is all zero, and desc_act is false: the groups are in order",)
    for claim in (None, True):
        with pytest.raises(AmbiguousIndexError):
            load(zeros, desc_act=claim).get_weights("a")


@pytest.mark.parametrize("left_out", ["g_idx", "none"])
def test_shapes_are_believed_before_the_bits_of_the_config(left_out: str) -> None:
    weights = load(two_groups(left_out), desc_act=False, bits=8)

    weight = weights.get_weights("a")

    assert weight.config.bits == 4
    assert_same_bits(weight.dequantize(), load(two_groups(), desc_act=False).get_weights("a").dequantize())
    assert "a: bits is 8, the shapes are of 4 bits and are believed" in weights.report().notes


def test_shapes_that_agree_on_no_bits_are_an_error_by_those_of_the_config() -> None:
    short = two_groups(qzeros=torch.zeros(2, 2, dtype=torch.int32))

    with pytest.raises(ShapeError, match=r"a\.qzeros: wrong shape\n  expected \(2, 1\)"):
        load(short, desc_act=False).get_weights("a")


def test_zero_points_whose_bits_do_not_fill_the_words_of_codes_are_not_believed() -> None:
    # Zero points say 3 bits, of which 4 words hold no whole number.
    words_of = {"qweight": (4, 32), "qzeros": (1, 3)}
    tensors = {f"a.{name}": torch.zeros(shape, dtype=torch.int32) for name, shape in words_of.items()}
    storage = MemoryStorage({**tensors, "a.scales": torch.ones(1, 32).half()})
    weights = Weights(storage, loader=GPTQWeightsLoader(bits=4, group_size=-1, desc_act=False))

    with pytest.raises(ShapeError, match=r"a\.qzeros: wrong shape\n  expected \(1, 4\)"):
        weights.get_weights("a")


def test_an_index_of_zeros_over_one_group_is_in_order() -> None:
    weight = gptq(4, words(0x11111111).repeat(8)[None], words(0)[None])

    assert not weight.g_idx.any()
    assert weight.dequantize().tolist() == [[2] * 8] * 8


@pytest.mark.parametrize(("bits", "group"), [(5, 128), (16, 128), (0, 128), (4, 0), (4, -2)])
def test_bits_and_group_sizes_there_are_none_of_are_refused(bits: int, group: int) -> None:
    with pytest.raises(ArgumentError, match=r"gptq: (bits|group_size)"):
        GPTQConfig(bits, group)


def test_a_group_size_that_the_shapes_deny_is_refused() -> None:
    weight = gptq(4, torch.zeros(4, 8, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32), groups=2)

    with pytest.raises(ShapeError, match=r"expected \(4, 8\) = \(K/8\^, N\)"):
        GPTQWeight(config=GPTQConfig(4, 8, V2), **weight.fields())


def test_a_ragged_last_group_is_cut_with_whole_scales() -> None:
    """K = 288 in groups of 128: two ranks cut at 144, inside of a group."""
    K, N = 288, 8
    tensors = {
        "a.qweight": torch.arange(K // 8 * N, dtype=torch.int32).reshape(-1, N) * 0x01234567,
        "a.qzeros": torch.full((3, 1), 0x12345678, dtype=torch.int32),
        "a.scales": torch.arange(1, 3 * N + 1).reshape(3, N).half(),
        "a.g_idx": torch.arange(K, dtype=torch.int32) // 128,
    }
    loader = FormatLoader(ConfiguredFormat(GPTQWeight, GPTQConfig(4, 128)))

    parts = [
        Weights(MemoryStorage(tensors), loader=loader, process_group=rank).get_weights_row("a")
        for rank in FakeWorld(2)
    ]

    whole = Weights(MemoryStorage(tensors), loader=loader).get_weights("a").dequantize()
    assert torch.equal(torch.cat([part.dequantize() for part in parts], 1), whole)
    assert [part.scales.shape[0] for part in parts] == [3, 3]
    assert parts[1].g_idx[0] == 1
