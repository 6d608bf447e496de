"""AWQ: one element at a time, and the facts of its groups."""

import pytest
import torch

from qload.errors import ArgumentError, CutError, ShapeError
from qload.formats import AWQConfig, AWQWeight
from qload.layouts import awq
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")


def layer(K: int, N: int, group: int) -> AWQWeight:
    groups = 1 if group == -1 else K // group
    return AWQWeight(
        config=AWQConfig(group),
        qweight=torch.zeros(K, N // 8, dtype=torch.int32),
        qzeros=torch.zeros(groups, N // 8, dtype=torch.int32),
        scales=torch.ones(groups, N, dtype=torch.float16),
    )


@pytest.mark.parametrize(
    ("n", "word", "nibble"),
    [
        pytest.param(0, 0, 0, id="origin"),
        pytest.param(2, 0, 1, id="even columns come first"),
        pytest.param(4, 0, 2, id="all four of them"),
        pytest.param(6, 0, 3, id="in order"),
        pytest.param(1, 0, 4, id="then the odd ones"),
        pytest.param(7, 0, 7, id="to the highest nibble"),
        pytest.param(8, 1, 0, id="eight columns are a word"),
    ],
)
def test_one_element(n: int, word: int, nibble: int) -> None:
    codes = torch.zeros(3, 16, dtype=torch.int32)
    codes[2, n] = 1

    words = awq.columns(4).pack(codes)

    assert words.nonzero().tolist() == [[2, word]]
    assert words[2, word] == 1 << (4 * nibble)


def test_eight_bits_interleave_four_columns() -> None:
    words = awq.columns(8).pack(torch.tensor([[0x11, 0x22, 0x33, 0x44]]))

    assert words.tolist() == [[0x44223311]]


def test_dequantize_by_hand() -> None:
    """Codes 0..7 in column order, zero points 1, scales 2 and 4 of two groups."""
    weight = layer(K=2, N=8, group=1)
    weight.qweight.fill_(0x75316420)
    weight.qzeros.fill_(0x11111111)
    weight.scales[0], weight.scales[1] = 2, 4

    assert weight.dequantize().tolist() == [[2 * (n - 1), 4 * (n - 1)] for n in range(8)]


@pytest.mark.parametrize("group", [-1, 64])
def test_one_group_is_kept_whole_by_every_rank(group: int) -> None:
    weight = layer(K=64, N=8, group=group)
    tensors = {f"a.{name}": tensor for name, tensor in weight.fields().items()}
    loader = FormatLoader(ConfiguredFormat(AWQWeight, AWQConfig(group)))

    share = Weights(MemoryStorage(tensors), loader=loader, process_group=Rank(2, 4)).get_weights_row("a")

    assert (share.shape, tuple(share.scales.shape)) == ((8, 16), (1, 8))


def test_a_cut_inside_a_group_is_refused_with_the_lawful_ones() -> None:
    tensors = {f"a.{name}": tensor for name, tensor in layer(K=192, N=8, group=64).fields().items()}
    loader = FormatLoader(ConfiguredFormat(AWQWeight, AWQConfig(64)))
    weights = Weights(MemoryStorage(tensors), loader=loader, process_group=Rank(0, 2))

    with pytest.raises(CutError) as caught:
        weights.get_weights_row("a")

    assert str(caught.value).splitlines() == [
        "a.qzeros: cannot cut K = 192 at 96 for 2 ranks",
        "  cuts must be multiples of 64   as qzeros is (K/64, N/8)",
        "  nearest  64 or 128",
        "  lawful   world sizes 3",
    ]


@pytest.mark.parametrize(("bits", "group"), [(2, 128), (3, 128), (4, 0), (4, -2)])
def test_bits_and_group_sizes_there_are_none_of_are_refused(bits: int, group: int) -> None:
    with pytest.raises(ArgumentError, match="awq: "):
        AWQConfig(group, bits)


def test_a_group_size_that_the_shapes_deny_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"expected \(6, 1\) = \(K/32, N/8\)"):
        AWQWeight(config=AWQConfig(32), **layer(K=192, N=8, group=64).fields())
