"""GPTQ and AWQ in Marlin's order: by hand, padded, permuted, cut, and restored bit for bit."""

import pytest
import torch
from torch import Tensor

from qload.errors import RepackError
from qload.formats import AWQConfig, AWQWeight, GPTQConfig, GPTQWeight
from qload.kernel_formats import repack
from qload.kernel_formats.marlin import count_locks, fits_thread_blocks, pad_shape
from qload.layouts import STORED_MINUS_ONE, Stored, StoredMinusOneUnmasked, ZeroPoints, awq, gptq
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.kernel_formats.marlin_layers import assert_exact, layer, row_share

pytestmark = pytest.mark.usefixtures("seen_texts")

GROUPED = [0, 8, 16, 24, 32, 40, 48, 56]  # columns of the first scales
PER_COLUMN = [0, 1, 8, 9, 16, 17, 24, 25]
ACT_ORDERS = pytest.mark.parametrize("act", [False, True], ids=["in order", "act order"])


def columns_of(scales: Tensor) -> list[int]:
    """Return the columns of the first eight scales of the last row, if column n has scale n."""
    return scales[-1, :8].int().tolist()


def test_one_code_by_hand() -> None:
    """Row 1 of column 0 is nibble 4 of word 0; zero points that are all 8 need no qzeros."""
    weight = layer(128, 64, -1)
    weight.qweight.fill_(-0x77777778)  # 0x88888888: codes of weight 0
    weight.qweight[0, 0] = -0x77777748  # 0x888888B8

    packed = repack(weight, "marlin").fields()

    assert packed.keys() == {"qweight", "scales"}
    assert packed["qweight"].shape == (8, 128)
    assert int(packed["qweight"][0, 0]) & 0xFFFFFFFF == 0x888B8888
    assert (packed["qweight"].flatten()[1:] == -0x77777778).all()


def test_one_permuted_row_by_hand() -> None:
    """The first 64 rows are of group 1: row 64 is the first permuted row."""
    weight = layer(128, 64, 64)
    weight.g_idx.copy_(1 - weight.g_idx)
    weight.qweight.fill_(-0x77777778)
    weight.qweight[8, 0] = -0x77777775  # 0x8888888B: row 64 of column 0

    packed = repack(GPTQWeight(config=GPTQConfig(4, 64), **weight.fields()), "marlin").fields()

    assert packed["perm"].tolist() == [*range(64, 128), *range(64)]
    assert packed["g_idx"].tolist() == [0] * 64 + [1] * 64
    assert int(packed["qweight"][0, 0]) & 0xFFFFFFFF == 0x8888888B
    assert (packed["qweight"].flatten()[1:] == -0x77777778).all()


@ACT_ORDERS
@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("K", "N", "group"),
    [
        (128, 64, 32), (64, 128, 64), (160, 72, 32), (160, 72, -1), (288, 72, 32), (288, 136, 128),
        (192, 64, 64), (64, 8, 32), (8, 8, -1), (256, 128, 256), (320, 200, 64),
    ],
)  # fmt: skip
def test_padding_changes_nothing(K: int, N: int, group: int, bits: int, sym: bool, act: bool) -> None:
    packed = assert_exact(layer(K, N, group, bits=bits, sym=sym, act=act))

    Kp, Np = 16 * packed.qweight.shape[0], 2 * packed.qweight.shape[1] // bits
    assert (Kp % 128, Np % 64) == (0, 0) or (Kp % 64, Np % 128) == (0, 0)
    assert packed.scales.shape == (1 if group in (-1, K) else Kp // group, Np)
    assert (packed.qzeros is None) == sym


@pytest.mark.parametrize(
    ("N", "K", "group", "want"),
    [
        pytest.param(64, 128, 128, (64, 128), id="whole thread blocks stay"),
        pytest.param(128, 64, -1, (128, 64), id="of either shape"),
        pytest.param(64, 64, -1, (64, 128), id="the smaller area, then the smaller sum"),
        pytest.param(72, 160, 32, (128, 192), id="columns and rows"),
        pytest.param(64, 288, 128, (64, 384), id="whole groups"),
        pytest.param(128, 192, 128, (128, 256), id="whole groups of rows that fill blocks"),
    ],
)
def test_shapes_are_padded_to_whole_thread_blocks_and_groups(
    N: int, K: int, group: int, want: tuple[int, int]
) -> None:
    assert pad_shape(N, K, group) == want
    assert fits_thread_blocks(*want)
    assert fits_thread_blocks(N, K) == (pad_shape(N, K, -1) == (N, K))


@pytest.mark.parametrize(
    ("N", "multiprocessors", "sparse", "count"),
    [
        pytest.param(4096, 132, False, 1024, id="16 for 64 columns"),
        pytest.param(64, 132, False, 528, id="four for a multiprocessor"),
        pytest.param(4096, 132, True, 2048, id="2:4: 64 for 128 columns"),
        pytest.param(192, 132, True, 128, id="2:4: a part of 128 is whole"),
    ],
)
def test_there_is_a_lock_for_every_block(N: int, multiprocessors: int, sparse: bool, count: int) -> None:
    assert count_locks(N, multiprocessors, sparse=sparse) == count


@pytest.mark.parametrize(
    ("act", "group", "world", "indexed", "full"),
    [
        pytest.param(False, -1, 1, False, True, id="one group"),
        pytest.param(False, -1, 2, False, True, id="one group, cut"),
        pytest.param(True, -1, 1, False, True, id="one group in any order"),
        pytest.param(True, -1, 2, False, True, id="one group in any order, cut"),
        pytest.param(False, 64, 1, False, True, id="groups"),
        pytest.param(False, 64, 2, False, True, id="groups, cut between two"),
        pytest.param(False, 64, 4, True, False, id="groups, cut inside of one"),
        pytest.param(True, 64, 1, True, True, id="act order"),
        pytest.param(True, 64, 2, True, False, id="act order, cut"),
    ],
)
def test_k_is_full_unless_a_cut_took_rows_of_a_group(
    act: bool, group: int, world: int, indexed: bool, full: bool
) -> None:
    whole = layer(384, 64, group, act=act)

    for rank in range(world):
        packed = assert_exact(row_share(whole, rank, world))

        assert (packed.config.is_k_full, packed.config.act_order) == (full, indexed)
        assert (packed.perm is not None, packed.g_idx is not None) == (indexed, indexed)


def test_a_column_share_of_an_act_order_has_all_rows() -> None:
    weight = layer(384, 128, 64, act=True)
    tensors = {f"a.{name}": tensor for name, tensor in weight.fields().items()}
    loader = FormatLoader(ConfiguredFormat(GPTQWeight, GPTQConfig(4, 64)))

    for rank in FakeWorld(2):
        weights = Weights(MemoryStorage(tensors), loader=loader, process_group=rank)
        assert assert_exact(weights.get_weights_col("a")).config.is_k_full


def test_a_cut_inside_a_group_keeps_every_scale_and_an_index() -> None:
    """K = 384 in groups of 128, two ranks: rank 1 begins in the middle of group 1."""
    packed = assert_exact(row_share(layer(384, 64, 128), 1, 2))

    assert packed.scales.shape[0] == 3
    assert packed.g_idx[:192].tolist() == [1] * 64 + [2] * 128
    assert packed.perm.tolist() == list(range(packed.perm.numel()))


def test_an_act_order_of_uneven_groups_keeps_an_index() -> None:
    """The kernel computes groups from row numbers only for groups of one size."""
    weight = layer(128, 64, 32)
    weight.g_idx[:33].copy_(torch.tensor([1] * 33))

    packed = assert_exact(GPTQWeight(config=GPTQConfig(4, 32), **weight.fields()))

    assert (packed.config.act_order, packed.config.is_k_full) == (True, False)


@pytest.mark.parametrize(
    ("K", "group", "world", "order"),
    [
        pytest.param(256, -1, 1, PER_COLUMN, id="one group"),
        pytest.param(256, 256, 1, PER_COLUMN, id="a group of all rows"),
        pytest.param(256, 128, 1, GROUPED, id="two groups"),
        pytest.param(256, 128, 2, PER_COLUMN, id="two groups, one left to a rank"),
        pytest.param(512, 128, 2, GROUPED, id="two groups left to a rank"),
    ],
)
def test_the_order_of_scales_depends_on_the_number_of_local_groups(
    K: int, group: int, world: int, order: list[int]
) -> None:
    """The kernel reads a single row of scales as one per column, in a share too."""
    weight = layer(K, 64, group)
    weight.scales.copy_(torch.arange(64).expand_as(weight.scales))

    packed = assert_exact(row_share(weight, world - 1, world))

    assert columns_of(packed.scales) == order
    assert (packed.config.group_size == -1) == (order == PER_COLUMN)


@pytest.mark.parametrize("group", [-1, 64])
def test_zero_points_have_the_order_of_groups_even_for_one(group: int) -> None:
    """Columns 0, 16, 32, 48, 8, 24, 40, 56 are word 0; the zero point of column n is n % 16."""
    weight = layer(128, 64, group, sym=False)

    words = assert_exact(weight).qzeros[-1]

    assert [word & 0xFFFFFFFF for word in words.tolist()] == [0x88880000 + 0x11111111 * u for u in range(8)]


def test_a_single_asymmetric_zero_point_stores_all_of_them() -> None:
    weight = layer(128, 64, 64)
    weight.qzeros[1, 3] += 1  # column 24: 9

    packed = assert_exact(weight)

    assert packed.config.zero_point
    assert [word & 0xFFFFFFFF for word in packed.qzeros[:, 0].tolist()] == [0x88888888, 0x88988888]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [-1, 32, 128])
def test_awq_and_gptq_of_one_matrix_have_the_same_words(bits: int, group: int) -> None:
    as_gptq = layer(256, 64, group, bits=bits, sym=False)
    codes = gptq.rows(bits).unpack(as_gptq.qweight)
    zeros = STORED_MINUS_ONE.read(as_gptq.qzeros, gptq.columns(bits))
    as_awq = AWQWeight(
        config=AWQConfig(group, bits),
        qweight=awq.columns(bits).pack(codes),
        qzeros=Stored().write(zeros, awq.columns(bits)),
        scales=as_gptq.scales,
    )

    first, second = assert_exact(as_gptq).fields(), assert_exact(as_awq).fields()

    assert first.keys() == second.keys() == {"qweight", "scales", "qzeros"}
    for name, tensor in first.items():
        assert_same_bits(second[name], tensor)


@ACT_ORDERS
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("index", [torch.int16, torch.int32, torch.int64], ids=str)
def test_scales_and_a_restored_index_keep_their_dtype(
    scales: torch.dtype, index: torch.dtype, act: bool
) -> None:
    packed = assert_exact(layer(128, 64, 32, scales=scales, index=index, act=act))

    assert packed.scales.dtype == scales
    assert [t.dtype for t in (packed.g_idx, packed.perm) if t is not None] == [torch.int32] * 2 * act


def with_zero_points(zeros: ZeroPoints) -> GPTQWeight:
    weight = layer(128, 64, 64)
    weight.qzeros.fill_(-1)
    return GPTQWeight(config=GPTQConfig(4, 64, zeros, positional=True), **weight.fields())


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        pytest.param(layer(128, 64, 64, bits=2), "reads 4 or 8 bits, got 2", id="2 bits"),
        pytest.param(layer(128, 64, 64, bits=3), "reads 4 or 8 bits, got 3", id="3 bits"),
        pytest.param(
            layer(96, 64, 48), "64, 128, multiples of them, or one group, got 48", id="groups of 48"
        ),
        pytest.param(
            with_zero_points(StoredMinusOneUnmasked()), "a zero point of 16 does not fit 4 bits", id="zero 16"
        ),
    ],
)
def test_a_weight_beyond_the_kernel_is_refused_with_the_reason(weight: GPTQWeight, reason: str) -> None:
    with pytest.raises(RepackError, match=reason):
        repack(weight, "marlin")


@pytest.mark.parametrize("zeros", [STORED_MINUS_ONE, Stored()], ids=lambda zeros: zeros.name)
def test_zero_points_are_restored_in_their_convention(zeros: ZeroPoints) -> None:
    """Words of ones: zero points of 15, or of 0 and then 1 with 1 subtracted from whole words."""
    assert_exact(with_zero_points(zeros))
