"""NVFP4 and MXFP4 in strips: values and bytes bit for bit, one block by hand, shares, and refusals."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload.errors import ArgumentError, RepackError
from qload.formats import CTMXFP4Weight, CTNVFP4Weight, ModelOptNVFP4Weight, MXFP4Config, NVFP4Config
from qload.kernel_formats import Fp4StripsConfig, Fp4StripsWeight, repack, restore
from qload.layouts import fp4, strips
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.repacking import RepackingLoader
from qload.spec import Layer, Weight
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.kernel_formats.fp4_layers import NVFP4, mxfp4, nvfp4

LARGEST = torch.tensor([246])  # 448 * 2**7 as s0e5m3


def pack(weight: Weight) -> Fp4StripsWeight:
    packed = repack(weight, "strips")
    assert isinstance(packed, Fp4StripsWeight)
    return packed


def assert_is_the_checkpoint(packed: Fp4StripsWeight, weight: Any) -> None:
    restored = restore(packed)
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert (type(restored), restored.config, restored.layer) == (type(weight), weight.config, weight.layer)
    assert restored.fields().keys() == weight.fields().keys()
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name].view(torch.uint8), tensor.view(torch.uint8))


def kernel_weight(packed: Fp4StripsWeight) -> Tensor:
    """Compute the padded weight (N, K), float64, from the three tensors that a kernel reads."""
    codes = strips.rows(4).unpack(packed.qweight)
    size = packed.config.group_size
    stored = strips.group_scales(size).undo(packed.scales)
    scales = fp4.from_s0e5m3(stored).double().repeat_interleave(size, 0) * 2.0**-15
    values = fp4.values(codes.device).double()[codes.long()]
    return (values * scales * packed.column_scales.double()).T


@given(
    N=st.integers(1, 200),
    groups=st.integers(1, 25),
    kind=st.sampled_from([CTNVFP4Weight, ModelOptNVFP4Weight]),
    second=st.sampled_from([0.0, 2.0**-9, 1.0, 0.37, 3000.0]),
    static=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_nvfp4_has_the_same_values_and_comes_back_bit_for_bit(
    N: int, groups: int, kind: Any, second: float, static: bool, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    scales = torch.randint(0x7F, (N, groups), generator=make).to(torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.randint(16, (N, 16 * groups), generator=make)
    second = second or (1.0 if kind is CTNVFP4Weight else 0.0)
    name = "input_global_scale" if kind is CTNVFP4Weight else "input_scale"
    weight = nvfp4(scales.float(), codes, second, kind, **({name: torch.tensor([0.7])} if static else {}))

    packed = pack(weight)

    assert_is_the_checkpoint(packed, weight)
    exact = kernel_weight(packed)[:N, : 16 * groups]
    want, unit = weight.dequantize().double(), torch.finfo(torch.float32).eps
    assert bool(((exact - want).abs() <= 1.5 * unit * want.abs()).all())  # three roundings to float32


@given(
    N=st.integers(1, 200),
    groups=st.integers(1, 12),
    largest=st.integers(0, 252),  # 6 times a larger one overflows float32
    dtype=st.sampled_from([torch.uint8, torch.float8_e8m0fnu]),
    seed=st.integers(0, 1 << 16),
)
def test_mxfp4_has_the_same_values_and_comes_back_bit_for_bit(
    N: int, groups: int, largest: int, dtype: torch.dtype, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    exponents = largest - torch.randint(25, (N, groups), generator=make)
    exponents[torch.rand(N, groups, generator=make) < 0.1] = 0
    stored = exponents.clamp(min=0).to(torch.uint8)
    codes = fp4.pack(torch.randint(16, (N, 32 * groups), generator=make))
    config = MXFP4Config(exponents=dtype)
    weight = CTMXFP4Weight(config=config, weight_packed=codes, weight_scale=stored.view(dtype))

    packed = pack(weight)

    assert_is_the_checkpoint(packed, weight)
    off = (kernel_weight(packed)[:N, : 32 * groups] - weight.dequantize().double()).abs()
    far = (stored == 0) & (stored.amax(1, keepdim=True) > 24)  # of exponent 0, and another is far larger
    assert bool((off[~far.repeat_interleave(32, 1)] == 0).all())
    assert bool((off <= 6 * 2.0**-127).all())


def test_one_unit_of_a_warp_by_hand() -> None:
    codes, scales = torch.zeros(64, 128, dtype=torch.int64), torch.full((64, 8), 448.0)
    codes[9, 1], codes[1, 33], codes[16 + 8 + 2, 64 + 8 * 3 + 2 * 2] = 15, 7, 3
    scales[9, 0], scales[1, 3], scales[16 + 8 + 2, 5] = 1.0, 2.0, 4.0

    packed = pack(nvfp4(scales, codes, 1.0))

    words = packed.qweight.reshape(2, 4, 8, 4, 4)  # 64 rows, 16 columns, column of 8, lane of 4, word
    assert words.nonzero().tolist() == [[0, 0, 1, 0, 0], [1, 1, 2, 3, 2]]
    # Nibbles from the highest bit: two rows r, 32 rows later i, 8 columns later b.
    assert words[0, 0, 1, 0, 0].item() & 0xFFFFFFFF == (15 << 4 * 5) | (7 << 4 * 6)
    assert words[1, 1, 2, 3, 2].item() == 3 << 4 * 1
    bytes_ = packed.scales.reshape(4, 8, 2, 4, 2)  # 16 columns, column of 8, half of 32 rows, 32 rows, b
    assert (bytes_ != LARGEST).nonzero().tolist() == [[0, 1, 0, 0, 1], [0, 1, 1, 1, 0], [1, 2, 1, 2, 1]]
    assert bytes_[bytes_ != LARGEST].tolist() == [(15 + 7) << 3, (15 + 8) << 3, (15 + 9) << 3]
    assert packed.column_scales.tolist() == [256.0] * 64


def test_groups_of_32_have_the_bytes_of_both_columns_side_by_side() -> None:
    exponents = torch.full((64, 4), 127)
    exponents[8 + 3, 2] = 120

    packed = pack(mxfp4(exponents))

    bytes_ = packed.scales.reshape(4, 8, 4, 2)  # 16 columns, column of 8, 32 rows, b
    assert (bytes_ != 30 << 3).nonzero().tolist() == [[0, 3, 2, 1]]
    assert bytes_[0, 3, 2, 1] == (30 - 7) << 3
    assert packed.column_scales.tolist() == [1.0] * 64


def test_padding_is_codes_and_scales_of_zero() -> None:
    packed = pack(nvfp4(torch.ones(72, 9), torch.full((72, 144), 15)))

    codes = strips.rows(4).unpack(packed.qweight)
    scales = strips.group_scales(16).undo(packed.scales)
    assert (tuple(codes.shape), packed.padded_shape, tuple(scales.shape)) == (
        (256, 128),
        (128, 256),
        (16, 128),
    )
    assert not bool(codes[144:].any() or codes[:, 72:].any() or scales[9:].any() or scales[:, 72:].any())
    assert packed.column_scales.tolist() == [128.0] * 72 + [0.0] * 56


@NVFP4
def test_fused_parts_have_their_own_scale_in_their_own_columns(kind: Any) -> None:
    layer = Layer((32, 64), 128, (96, 128), "qk")
    weight = nvfp4(torch.ones(96, 8), second=[0.5, 4.0], kind=kind, layer=layer)

    packed = pack(weight)

    each = [512.0, 64.0] if kind is CTNVFP4Weight else [128.0, 1024.0]
    assert packed.column_scales.tolist() == [each[0]] * 32 + [each[1]] * 64 + [0.0] * 32
    assert_is_the_checkpoint(packed, weight)


@pytest.mark.parametrize("rows", [False, True], ids=["outputs", "inputs"])
@pytest.mark.parametrize("mx", [False, True], ids=["nvfp4", "mxfp4"])
def test_shares_together_are_the_layer(mx: bool, rows: bool) -> None:
    exponents = 120 + torch.arange(128 * 8).reshape(128, 8) % 13
    stored: Any = mxfp4(exponents) if mx else nvfp4(2.0 ** (exponents.repeat(1, 2) - 126.0))
    tensors = {f"a.{name}": tensor for name, tensor in stored.fields().items()}
    loader = RepackingLoader(FormatLoader(ConfiguredFormat(type(stored), stored.config)), "strips")

    def load(rank: int, world: int) -> Any:
        weights = Weights(MemoryStorage(tensors), loader=loader, process_group=Rank(rank, world))
        return weights.get_weights_row("a") if rows else weights.get_weights_col("a")

    whole, shares = load(0, 1), [load(rank, 2) for rank in (0, 1)]

    assert {type(each) for each in (whole, *shares)} == {Fp4StripsWeight}
    assert_same_bits(torch.cat([each.dequantize() for each in shares], 1 if rows else 0), whole.dequantize())


@pytest.mark.usefixtures("seen_texts")
def test_a_weight_built_by_hand_is_not_restored() -> None:
    packed = pack(nvfp4(torch.ones(64, 8)))
    by_hand = Fp4StripsWeight(config=packed.config, layer=Layer((64,), 128, (64, 128)), **packed.fields())

    with pytest.raises(RepackError, match="built by hand"):
        restore(by_hand)


def nan_scales() -> Any:
    weight = nvfp4(torch.ones(64, 8))
    weight.weight_scale.view(torch.uint8)[5, 3] = 0x7F
    return weight


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("weight", "text"),
    [
        pytest.param(nan_scales(), "1 of 512 scales of .*weight_scale are NaN: .* 5 and group 3", id="nan"),
        pytest.param(nvfp4(-torch.ones(64, 8)), "512 of 512 .* are negative", id="negative"),
        pytest.param(mxfp4(torch.full((64, 4), 255)), "256 of 256 .* are NaN", id="nan of mxfp4"),
        pytest.param(
            mxfp4(torch.tensor([[100, 125], [100, 124]])),
            r"1 of 4 .* more than 2\*\*24 times",
            id="far apart",
        ),
        pytest.param(
            nvfp4(torch.ones(64, 8), second=torch.inf), r"256 \* .*weight_scale_2 of inf overflows", id="inf"
        ),
        pytest.param(
            nvfp4(torch.ones(64, 8), second=0.0, kind=CTNVFP4Weight), "256 / .* of 0 overflows", id="by zero"
        ),
        pytest.param(nvfp4(torch.ones(64, 8), second=2.0**-140), "of 7.17465e-43 .* loses bits", id="tiny"),
    ],
)
def test_what_strips_cannot_represent_is_refused(weight: Weight, text: str) -> None:
    with pytest.raises(RepackError, match=text):
        pack(weight)


@pytest.mark.usefixtures("seen_texts")
def test_a_share_is_refused_for_the_scales_of_its_layer() -> None:
    exponents = torch.tensor([[100, 100, 100, 100, 125, 125, 125, 125]]).expand(64, 8)
    whole, share = mxfp4(exponents), mxfp4(exponents[:, :4])

    with pytest.raises(RepackError, match="256 of 512 scales"):
        repack(share, "strips", whole=whole)


@pytest.mark.usefixtures("seen_texts")
def test_a_config_of_other_groups_is_refused() -> None:
    with pytest.raises(ArgumentError, match="fp4_strips: group_size"):
        Fp4StripsConfig(64)
    assert NVFP4Config()
