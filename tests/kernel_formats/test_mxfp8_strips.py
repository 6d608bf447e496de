"""MXFP8 in strips: values and bytes bit for bit, one block by hand, shares, and refusals."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload.errors import RepackError
from qload.formats import MXFP8Config, MXFP8Weight
from qload.kernel_formats import Mxfp8StripsWeight, repack, restore
from qload.layouts import fp4, strips
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.repacking import RepackingLoader
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights


def mxfp8(exponents: Tensor, codes: Tensor | None = None, dtype: torch.dtype = torch.uint8) -> MXFP8Weight:
    """Build a layer with `exponents` (N, K / 32) and bytes (N, K), by default of 1."""
    N, K = exponents.shape[0], 32 * exponents.shape[1]
    stored = torch.full((N, K), 0x38) if codes is None else codes
    return MXFP8Weight(
        config=MXFP8Config(),
        weight=stored.to(torch.uint8).view(torch.float8_e4m3fn),
        weight_scale=exponents.to(torch.uint8).view(dtype),
    )


def pack(weight: MXFP8Weight) -> Mxfp8StripsWeight:
    packed = repack(weight, "strips")
    assert isinstance(packed, Mxfp8StripsWeight)
    return packed


def operands(packed: Mxfp8StripsWeight) -> Tensor:
    """Compute the padded operands (K, N) of the kernels, float64: values times scales of groups."""
    values = strips.rows(8).unpack(packed.qweight).to(torch.uint8).view(torch.float8_e4m3fn).double()
    scales = fp4.from_s0e5m3(strips.group_scales(32).undo(packed.scales)).double()
    return values * scales.repeat_interleave(32, 0)


@given(
    N=st.integers(1, 200),
    groups=st.integers(1, 12),
    largest=st.integers(0, 246),  # 448 times a larger one overflows float32
    dtype=st.sampled_from([torch.uint8, torch.float8_e8m0fnu]),
    seed=st.integers(0, 1 << 16),
)
def test_values_are_the_same_and_the_checkpoint_comes_back_bit_for_bit(
    N: int, groups: int, largest: int, dtype: torch.dtype, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    exponents = (largest - torch.randint(22, (N, groups), generator=make)).clamp(min=0)
    exponents[torch.rand(N, groups, generator=make) < 0.1] = 0
    weight = mxfp8(exponents, torch.randint(256, (N, 32 * groups), generator=make), dtype)

    packed = pack(weight)
    restored: Any = restore(packed)

    want = weight.dequantize()
    assert_same_bits(packed.dequantize().nan_to_num(), want.nan_to_num())
    assert torch.equal(packed.dequantize().isnan(), want.isnan())
    assert (type(restored), restored.config, restored.layer) == (MXFP8Weight, weight.config, weight.layer)
    for name, tensor in weight.fields().items():
        assert restored.fields()[name].dtype == tensor.dtype
        assert_same_bits(restored.fields()[name].view(torch.uint8), tensor.view(torch.uint8))

    exact = operands(packed)
    for narrow in (torch.float16, torch.bfloat16):
        assert torch.equal(exact.to(narrow).double().nan_to_num(), exact.nan_to_num())
    values = (exact * 2.0**-7 * packed.column_scales.double()).T[:N, : 32 * groups]
    off = (values - want.double()).abs().nan_to_num()
    far = (exponents == 0) & (
        exponents.amax(1, keepdim=True) > 21
    )  # of exponent 0, and another is far larger
    assert bool((off[~far.repeat_interleave(32, 1)] == 0).all())
    assert bool((off <= 448 * 2.0**-127).all())


def test_one_group_by_hand() -> None:
    exponents, codes = torch.full((64, 4), 127), torch.full((64, 128), 0x38)
    exponents[16 + 8 + 2, 1], codes[16 + 8 + 2, 32 + 8 * 3 + 2 * 2] = 120, 0x45

    packed = pack(mxfp8(exponents, codes))

    words = packed.qweight.reshape(4, 4, 8, 4, 4)  # 32 rows, 16 columns, column of 8, lane of 4, word
    assert (words != 0x38383838).nonzero().tolist() == [[1, 1, 2, 3, 2]]
    assert words[1, 1, 2, 3, 2].item() == 0x38384538  # bytes from the highest: two rows, 8 columns later
    bytes_ = packed.scales.reshape(4, 8, 4, 2)  # 16 columns, column of 8, 32 rows, b
    assert (bytes_ != 22 << 3).nonzero().tolist() == [[1, 2, 1, 1]]
    assert bytes_[1, 2, 1, 1] == (22 - 7) << 3
    assert packed.column_scales.tolist() == [1.0] * 64


def test_padding_is_codes_and_scales_of_zero() -> None:
    packed = pack(mxfp8(torch.full((72, 5), 130)))

    codes, scales = strips.rows(8).unpack(packed.qweight), strips.group_scales(32).undo(packed.scales)
    assert (tuple(codes.shape), packed.padded_shape, tuple(scales.shape)) == (
        (256, 128),
        (128, 256),
        (8, 128),
    )
    assert not bool(codes[160:].any() or codes[:, 72:].any() or scales[5:].any() or scales[:, 72:].any())
    assert packed.column_scales.tolist() == [8.0] * 72 + [0.0] * 56


@pytest.mark.parametrize("rows", [False, True], ids=["outputs", "inputs"])
def test_shares_together_are_the_layer(rows: bool) -> None:
    stored = mxfp8(120 + torch.arange(128 * 8).reshape(128, 8) % 13)
    tensors = {f"a.{name}": tensor for name, tensor in stored.fields().items()}
    loader = RepackingLoader(FormatLoader(ConfiguredFormat(MXFP8Weight, stored.config)), "strips")

    def load(rank: int, world: int) -> Any:
        weights = Weights(MemoryStorage(tensors), loader=loader, process_group=Rank(rank, world))
        return weights.get_weights_row("a") if rows else weights.get_weights_col("a")

    whole, shares = load(0, 1), [load(rank, 2) for rank in (0, 1)]

    assert {type(each) for each in (whole, *shares)} == {Mxfp8StripsWeight}
    assert_same_bits(torch.cat([each.dequantize() for each in shares], 1 if rows else 0), whole.dequantize())


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("exponents", "text"),
    [
        pytest.param(torch.full((64, 4), 255), "256 of 256 .*weight_scale are NaN", id="nan"),
        pytest.param(
            torch.tensor([[100, 122, 0], [100, 121, 0]]),
            r"1 of 6 .* more than 2\*\*21 times smaller .* output 0 and group 0, is 100",
            id="far apart",
        ),
    ],
)
def test_what_strips_cannot_represent_is_refused(exponents: Tensor, text: str) -> None:
    with pytest.raises(RepackError, match=text):
        pack(mxfp8(exponents))


@pytest.mark.usefixtures("seen_texts")
def test_a_share_is_refused_for_the_scales_of_its_layer() -> None:
    exponents = torch.tensor([[100, 100, 100, 100, 122, 122, 122, 122]]).expand(64, 8)
    whole, share = mxfp8(exponents), mxfp8(exponents[:, :4])

    with pytest.raises(RepackError, match="256 of 512 scales"):
        repack(share, "strips", whole=whole)
