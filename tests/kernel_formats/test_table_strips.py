"""nf4 and fp4 of bitsandbytes in strips: values and bytes bit for bit, one block by hand, refusals."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload.errors import ArgumentError, RepackError
from qload.formats import BNB4Config, BNB4Weight, BNBFP4Weight, BNBNF4Weight
from qload.kernel_formats import TableStripsConfig, TableStripsWeight, repack, restore
from qload.layouts import strips
from qload.layouts.bnb import TABLES
from qload.spec import Layer
from qload.testing import assert_same_bits
from tests.kernel_formats.bnb4_layers import bnb4, pack

KINDS = pytest.mark.parametrize("kind", ["nf4", "fp4"])


@given(
    N=st.integers(1, 100),
    blocks=st.integers(1, 5),
    blocksize=st.sampled_from([64, 128, 256, 512]),
    kind=st.sampled_from(["nf4", "fp4"]),
    storage=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    power=st.integers(-80, 100),
    seed=st.integers(0, 1 << 16),
)
def test_values_are_the_same_and_the_checkpoint_comes_back_bit_for_bit(
    N: int, blocks: int, blocksize: int, kind: Any, storage: torch.dtype, power: int, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    absmax = (torch.rand(N * blocks, generator=make) + 2.0**-19) * 2.0**power
    absmax[torch.rand(N * blocks, generator=make) < 0.1] = 0
    codes = torch.randint(16, (N, blocks * blocksize), generator=make)
    weight = bnb4(codes, absmax, kind, blocksize, storage)

    packed = pack(weight)
    restored = restore(packed)

    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert (type(restored), restored.config, restored.layer) == (type(weight), weight.config, weight.layer)
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name].view(torch.uint8), tensor.view(torch.uint8))
    assert bool((packed.column_scales[:N].log2() % 1 == 0).all())
    each = strips.group_scales(packed.config.group_size).undo(packed.scales)[:, :N].amax(0)
    assert bool(((each == 0) | ((each >= 2.0**14) & (each < 2.0**15))).all())


def test_one_unit_of_a_warp_by_hand() -> None:
    codes = torch.full((64, 128), 7)
    codes[16 + 8 + 2, 64 + 8 * 3 + 2 * 2 + 1] = 12
    absmax = torch.ones(64, 2)
    absmax[16 + 8 + 2, 1] = 0.5

    packed = pack(bnb4(codes, absmax.flatten()))

    words = packed.qweight.reshape(2, 4, 8, 4, 4)  # 64 rows, 16 columns, column of 8, lane of 4, word
    assert (words != 0x77777777).nonzero().tolist() == [[1, 1, 2, 3, 2]]
    assert words[1, 1, 2, 3, 2].item() == 0x77C77777  # nibbles from the highest bit: r, 32 rows later, b
    scales = packed.scales.reshape(4, 8, 2, 2)  # 16 columns, column of 8, 64 rows, b
    assert (scales != 2.0**14).nonzero().tolist() == [[1, 2, 1, 1]]
    assert scales[1, 2, 1, 1] == 2.0**13
    assert packed.column_scales.tolist() == [2.0**-14] * 64


def test_padding_is_codes_and_scales_of_zero() -> None:
    packed = pack(bnb4(torch.full((72, 192), 15), torch.ones(72 * 3)))

    codes = strips.rows(4).unpack(packed.qweight)
    scales = strips.group_scales(64).undo(packed.scales)
    assert (tuple(codes.shape), packed.padded_shape, tuple(scales.shape)) == (
        (256, 128),
        (128, 256),
        (4, 128),
    )
    assert not bool(codes[192:].any() or codes[:, 72:].any() or scales[3:].any() or scales[:, 72:].any())
    assert packed.column_scales.tolist() == [2.0**-14] * 72 + [0.0] * 56


def test_longer_blocks_are_groups_of_128_with_equal_scales() -> None:
    packed = pack(bnb4(torch.zeros(64, 512), torch.rand(128) + 1, blocksize=256))

    scales = strips.group_scales(128).undo(packed.scales)
    assert packed.config == TableStripsConfig("nf4", 128)
    assert torch.equal(scales[::2], scales[1::2])


@pytest.mark.usefixtures("seen_texts")
def test_a_weight_built_by_hand_is_not_restored() -> None:
    packed = pack(bnb4(torch.zeros(64, 128), torch.ones(128)))
    by_hand = TableStripsWeight(config=packed.config, layer=Layer((64,), 128, (64, 128)), **packed.fields())

    with pytest.raises(RepackError, match="built by hand"):
        restore(by_hand)


def changed(index: int, value: float, fill: float = 1.0) -> Tensor:
    absmax = torch.full((128,), fill)
    absmax[index] = value
    return absmax


OTHER_TABLE = BNBNF4Weight(
    config=BNB4Config("nf4", K=128),
    weight=torch.zeros(64 * 64, 1, dtype=torch.uint8),
    absmax=torch.ones(128),
    quant_map=torch.arange(16) / 8 - 1,
)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("weight", "text"),
    [
        pytest.param(bnb4(torch.zeros(64, 96), torch.ones(96)), "got 64 of 96 inputs", id="across outputs"),
        pytest.param(
            bnb4(torch.zeros(64, 192), torch.ones(64), blocksize=192), "got 192 of 192 inputs", id="192"
        ),
        pytest.param(
            bnb4(torch.zeros(64, 128), torch.ones(256), blocksize=32), "got 32 of 128 inputs", id="32"
        ),
        pytest.param(OTHER_TABLE, "quant_map is not the table of nf4", id="another table"),
        pytest.param(
            bnb4(torch.zeros(64, 128), changed(3, 2.0**-21)),
            r"output 1 and block 1 is more than 2\*\*20 times smaller",
            id="far apart",
        ),
        pytest.param(bnb4(torch.zeros(64, 128), changed(3, torch.nan)), "finite scales", id="nan"),
        pytest.param(bnb4(torch.zeros(64, 128), changed(3, torch.inf)), "finite scales", id="inf"),
        pytest.param(
            bnb4(torch.zeros(64, 128), torch.full((128,), 2.0**-101)), "from 7.88861e-31", id="tiny"
        ),
    ],
)
def test_what_strips_cannot_represent_is_refused(weight: BNB4Weight, text: str) -> None:
    with pytest.raises(RepackError, match=text):
        repack(weight, "strips")


@pytest.mark.usefixtures("seen_texts")
def test_a_share_is_refused_for_the_scales_of_its_layer() -> None:
    whole = bnb4(torch.zeros(64, 128), changed(1, 2.0**-30))
    share = bnb4(torch.zeros(64, 64), torch.ones(64))

    with pytest.raises(RepackError, match="output 0 and block 1"):
        repack(share, "strips", whole=whole)


@KINDS
def test_the_kind_decides_the_table(kind: Any) -> None:
    packed = pack(bnb4(torch.arange(16).repeat(64, 8), torch.ones(128), kind))

    assert packed.dequantize()[5, :16].tolist() == torch.tensor(TABLES[kind]).tolist()
    assert isinstance(restore(packed), BNBNF4Weight if kind == "nf4" else BNBFP4Weight)


@pytest.mark.usefixtures("seen_texts")
def test_other_configs_are_refused() -> None:
    with pytest.raises(ArgumentError, match="table_strips: group_size"):
        TableStripsConfig("nf4", 32)
    with pytest.raises(ArgumentError, match="table_strips: quant_type"):
        TableStripsConfig("fp8")  # type: ignore[arg-type]
