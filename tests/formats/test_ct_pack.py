"""compressed-tensors, pack-quantized: one block by hand, and every way its tensors can be told apart."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import (
    AmbiguousIndexError,
    ArgumentError,
    CutError,
    MismatchError,
    MissingTensorError,
    RepackError,
    ShapeError,
)
from qload.formats import CTPackConfig, CTPackWeight, GPTQConfig, GPTQWeight
from qload.layouts import StoredMinusOneUnmasked, compressed_tensors
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")


def tensors(
    codes: Tensor, group: int, *, bits: int = 4, dense: bool = True, dtype: torch.dtype = torch.float16
) -> dict[str, Tensor]:
    """A layer of these codes (N, K), the scale of group g being g + 1."""
    N, K = codes.shape
    groups = 1 if group == -1 else -(-K // group)
    return {
        "weight_packed": compressed_tensors.pack(codes, bits, dense),
        "weight_scale": (torch.arange(groups) + 1).expand(N, groups).to(dtype).contiguous(),
        "weight_shape": torch.tensor([N, K]),
    }


def with_zeros(stored: dict[str, Tensor], zeros: Tensor, bits: int = 4) -> dict[str, Tensor]:
    """Zero points (N, G), packed along N."""
    return {**stored, "weight_zero_point": compressed_tensors.pack(zeros.T, bits, True).T.contiguous()}


def load(config: CTPackConfig, *layers: dict[str, Tensor], dim: str = "N", rank: Any = None) -> Any:
    named = {f"{i}.{name}": tensor for i, one in enumerate(layers) for name, tensor in one.items()}
    weights = Weights(
        MemoryStorage(named), loader=FormatLoader(ConfiguredFormat(CTPackWeight, config)), process_group=rank
    )
    if len(layers) > 1:
        return weights.get_multi_weights_col([str(i) for i in range(len(layers))])
    return weights.get_weights_row("0") if dim == "K" else weights.get_weights_col("0")


def test_dequantize_by_hand() -> None:
    """Codes 0..7 in one word; zero points 5 and 6 in one word; scales 2 and 4 of two groups."""
    weight = CTPackWeight(
        config=CTPackConfig(4, 4, symmetric=False),
        weight_packed=torch.full((2, 1), 0x76543210, dtype=torch.int32),
        weight_scale=torch.tensor([[2, 4], [2, 4]], dtype=torch.bfloat16),
        weight_zero_point=torch.tensor([[0x65, 0x65]], dtype=torch.int32),
    )

    assert weight.dequantize().tolist() == [
        [(2 if k < 4 else 4) * (k - (5 + n)) for k in range(8)] for n in range(2)
    ]


def test_trap_55_codes_are_stored_with_half_their_range_added() -> None:
    """Eight bits: a stored 0x80 is 0, and not -128, as two's complement would have it."""
    weight = load(CTPackConfig(8, -1), tensors(torch.tensor([[0x80, 0x00, 0xFF, 0x7F]]), -1, bits=8))

    assert weight.dequantize().tolist() == [[0, -128, 127, -1]]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_the_shape_tells_the_packing(bits: int, dense: bool) -> None:
    """And a version in the config that disagrees is not believed."""
    codes = torch.arange(2 * 288).reshape(2, 288) % 2**bits

    weight = load(CTPackConfig(bits, -1, dense=not dense), tensors(codes, -1, bits=bits, dense=dense))

    assert weight.config.dense == dense
    assert torch.equal(weight.dequantize(), codes.float() - 2 ** (bits - 1))


@pytest.mark.parametrize("dense", [True, False])
def test_a_shape_that_fits_both_packings_needs_the_version(dense: bool) -> None:
    """Twenty codes of three bits are two words either way."""
    codes = torch.arange(20).reshape(1, 20) % 8
    stored = tensors(codes, -1, bits=3, dense=dense)

    assert load(CTPackConfig(3, -1, dense=dense), stored).dequantize().tolist() == (codes - 4).tolist()
    with pytest.raises(MismatchError, match=r"0\.weight_packed: two packings of 3 bits fit its shape"):
        load(CTPackConfig(3, -1), stored)


def test_zero_points_tell_the_packing_where_codes_do_not() -> None:
    """Twenty inputs fit both; 200 outputs take 19 words of zero points densely, 20 by words."""
    codes, zeros = torch.zeros(200, 20, dtype=torch.int32), torch.arange(200).reshape(200, 1) % 8
    stored = with_zeros(tensors(codes, -1, bits=3), zeros, 3)

    weight = load(CTPackConfig(3, -1, symmetric=False), stored)

    assert weight.dequantize().tolist() == [[-(n % 8)] * 20 for n in range(200)]


def test_a_short_last_word_and_a_short_last_group_are_cut_off() -> None:
    """288 inputs in groups of 128: the third has 32."""
    codes = torch.full((2, 288), 9)

    weight = load(CTPackConfig(4, 128), tensors(codes, 128))

    assert weight.dequantize()[0].tolist() == [1] * 128 + [2] * 128 + [3] * 32
    assert load(CTPackConfig(4, -1), tensors(codes[:, :250], -1)).shape == (2, 250)


def test_a_ragged_layer_is_cut_between_groups_or_refused_by_every_rank_alike() -> None:
    """384 = 3 * 128 inputs for 3 ranks; 288 for 3 would cut groups."""
    codes = torch.full((2, 384), 9)
    shares = [load(CTPackConfig(4, 128), tensors(codes, 128), dim="K", rank=rank) for rank in FakeWorld(3)]
    texts = set()
    for rank in FakeWorld(3):
        with pytest.raises(CutError) as caught:
            load(CTPackConfig(4, 128), tensors(codes[:, :288], 128), dim="K", rank=rank)
        texts.add(str(caught.value))

    assert [share.dequantize().unique().tolist() for share in shares] == [[1], [2], [3]]
    assert len(texts) == 1


def test_act_order_gives_each_input_its_own_group() -> None:
    g_idx = torch.tensor([1, 0, 2, 0, 1, 2, 0, 1] * 4, dtype=torch.int32)
    stored = {**tensors(torch.full((1, 32), 9), 11), "weight_g_idx": g_idx}

    weight = load(CTPackConfig(4, 11, act_order=True), stored)

    assert weight.config.groups_lie == "anywhere"
    assert weight.dequantize()[0].tolist() == [group + 1 for group in g_idx.tolist()]


def test_a_cut_of_an_act_order_keeps_all_scales_and_cuts_the_index() -> None:
    g_idx = torch.arange(32, dtype=torch.int32) % 2
    stored = {**tensors(torch.full((1, 32), 9), 16), "weight_g_idx": g_idx}

    share = load(CTPackConfig(4, 16, act_order=True), stored, dim="K", rank=Rank(1, 4))

    assert share.weight_scale.shape == (1, 2)
    assert share.dequantize()[0].tolist() == [1, 2] * 4


@pytest.mark.parametrize(("world", "groups"), [(2, 1), (4, 2)])
def test_a_positional_index_is_cut_with_its_groups_where_the_cuts_fall_between_them(
    world: int, groups: int
) -> None:
    """Two groups of 16: two ranks get one each and count from it; of four each keeps both."""
    stored = {
        **tensors(torch.full((1, 32), 9), 16),
        "weight_g_idx": torch.arange(32, dtype=torch.int32) // 16,
    }

    share = load(CTPackConfig(4, 16, act_order=True), stored, dim="K", rank=Rank(world - 1, world))

    assert share.config.groups_lie == "positional"
    assert share.weight_scale.shape == (1, groups)
    assert share.dequantize().unique().tolist() == [2]


def test_trap_53_zero_points_are_packed_along_the_outputs() -> None:
    """Nine outputs: the ninth zero point begins a second word; the groups lie side by side."""
    zeros = torch.stack([torch.arange(9), torch.arange(9) + 5], dim=1)
    stored = with_zeros(tensors(torch.zeros(9, 16, dtype=torch.int32), 8), zeros)

    weight = load(CTPackConfig(4, 8, symmetric=False), stored)

    assert weight.weight_zero_point.shape == (2, 2)
    assert weight.dequantize()[:, 0].tolist() == [-n for n in range(9)]
    assert weight.dequantize()[:, 8].tolist() == [-2 * (n + 5) for n in range(9)]


def test_a_seam_inside_a_word_of_zero_points_is_refused() -> None:
    """Of 12 outputs 4 would follow in half a word; after the last part nothing follows."""
    part = with_zeros(
        tensors(torch.zeros(12, 8, dtype=torch.int32), -1), torch.ones(12, 1, dtype=torch.int32)
    )
    whole = with_zeros(
        tensors(torch.zeros(16, 8, dtype=torch.int32), -1), torch.ones(16, 1, dtype=torch.int32)
    )
    config = CTPackConfig(4, -1, symmetric=False)

    assert load(config, whole, part).dequantize().tolist() == [[-1] * 8] * 28
    with pytest.raises(CutError, match=r"0\.weight_zero_point: cannot cut N = 12 at 12\n"):
        load(config, part, whole)


def test_symmetric_parts_of_odd_sizes_fuse() -> None:
    parts = [tensors(torch.full((n, 8), 8 + n), -1) for n in (3, 5)]

    assert load(CTPackConfig(4, -1), *parts).dequantize()[:, 0].tolist() == [3] * 3 + [5] * 5


def test_groups_that_straddle_shares_are_refused() -> None:
    with pytest.raises(CutError, match="cuts must be multiples of 128 "):
        load(
            CTPackConfig(4, 128),
            tensors(torch.zeros(2, 384, dtype=torch.int32), 128),
            dim="K",
            rank=Rank(0, 2),
        )


def test_scales_of_bf16_are_multiplied_exactly_and_rounded_by_who_asks() -> None:
    """255 * (1 + 2**-7) takes 15 bits, which float32 holds: one rounding then is the owner's number."""
    stored = tensors(torch.tensor([[255] * 4]), -1, bits=8, dtype=torch.bfloat16)
    stored["weight_scale"].fill_(1 + 2**-7)
    stored = with_zeros(stored, torch.zeros(1, 1, dtype=torch.int32), 8)

    got = load(CTPackConfig(8, -1, symmetric=False), stored).dequantize()

    assert got.tolist() == [[255 * (1 + 2**-7)] * 4]
    assert got.bfloat16().tolist() == [[256.0] * 4]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"weight_shape": torch.tensor([3, 16])}, MismatchError, "not the shape of this layer"),
        ({"weight_shape": torch.tensor([2, -16])}, MismatchError, "not the shape of this layer"),
        ({"weight_shape": torch.tensor([2, 99])}, ShapeError, "weight_packed: wrong shape"),
        ({"weight_scale": torch.ones(2, 3).half()}, ShapeError, r"\(2, 2\) = \(N, K/8\^\)"),
        ({"weight_g_idx": torch.zeros(16, dtype=torch.int32)}, AmbiguousIndexError, "all zero"),
        ({"weight_zero_point": torch.zeros(3, 2, dtype=torch.int32)}, ShapeError, "zero_point: wrong shape"),
        ({"input_scale": torch.ones(2)}, ShapeError, r"(?s)input_scale.*\(\) or \(1,\)"),
        ({"input_zero_point": torch.zeros(2, dtype=torch.int8)}, ShapeError, r"(?s)point.*\(\) or \(1,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    change: dict[str, Tensor], error: type[Exception], text: str
) -> None:
    stored = tensors(torch.zeros(2, 16, dtype=torch.int32), 8)

    with pytest.raises(error, match=text):
        load(CTPackConfig(4, 8), {**stored, **change})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(CTPackConfig(4, 8, symmetric=False), "weight_zero_point", id="asymmetric"),
        pytest.param(CTPackConfig(4, 8, act_order=True), "weight_g_idx", id="act order"),
    ],
)
def test_what_a_config_promises_has_to_be_there(config: CTPackConfig, name: str) -> None:
    with pytest.raises(MissingTensorError, match=rf"0\.{name}: not in the checkpoint"):
        load(config, tensors(torch.zeros(2, 16, dtype=torch.int32), 8))


@pytest.mark.parametrize(("bits", "group"), [(1, 8), (9, 8), (4, 0)])
def test_bits_and_group_sizes_there_are_none_of_are_refused(bits: int, group: int) -> None:
    with pytest.raises(ArgumentError, match=r"ct_pack: (bits|group_size)"):
        CTPackConfig(bits, group)


def test_codes_that_its_words_cannot_store_are_refused() -> None:
    unmasked = GPTQWeight(
        config=GPTQConfig(4, 64, zeros=StoredMinusOneUnmasked()),
        qweight=torch.zeros(16, 8, dtype=torch.int32),
        qzeros=torch.full((2, 1), -1, dtype=torch.int32),
        scales=torch.ones(2, 8, dtype=torch.float16),
        g_idx=torch.arange(128, dtype=torch.int32) // 64,
    )

    with pytest.raises(RepackError) as caught:
        CTPackWeight.from_integers(unmasked.to_integers())

    assert (caught.value.source, caught.value.layout) == ("gptq", "compressed-tensors")
    assert caught.value.reason == "a zero point of 16 does not fit 4 bits"


@pytest.mark.parametrize(("N", "K", "name"), [(8, 12, "weight_packed"), (12, 8, "weight_zero_point")])
def test_unused_bits_that_a_repack_would_lose_are_refused(N: int, K: int, name: str) -> None:
    stored = with_zeros(tensors(torch.ones(N, K).long(), -1), torch.full((N, 1), 7))
    config = CTPackConfig(4, -1, symmetric=False)
    weight = load(config, stored)
    assert weight.to_integers().bits == 4
    words = stored[name].clone()
    words.view(-1)[-1] |= 1 << 30
    changed = load(config, {**stored, name: words})

    with pytest.raises(RepackError, match="the unused bits of a word are not 0, and would be lost") as caught:
        changed.to_integers()

    assert (caught.value.source, caught.value.layout) == ("0", "other layouts")
    assert torch.equal(changed.dequantize(), weight.dequantize())


@pytest.mark.parametrize(("K", "is_known"), [(24, True), (20, False)])
def test_kernels_read_only_filled_words(K: int, is_known: bool) -> None:
    words = torch.full((8, 3), 0x11111111, dtype=torch.int32)
    config = CTPackConfig(4, -1, shape=(8, K), dense=False)
    weight = CTPackWeight(config=config, weight_packed=words, weight_scale=torch.ones(8, 1))

    assert weight.shape == (8, K)
    assert (weight.stored() is not None) == is_known
