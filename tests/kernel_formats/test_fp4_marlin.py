"""Four-bit floats in Marlin's order: a block by hand, raised scales, both generations, and the restore."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.errors import RepackError
from qload.formats import CTMXFP4Weight, CTNVFP4Weight, ModelOptNVFP4Weight
from qload.kernel_formats import repack, restore
from qload.spec import Layer, Weight
from qload.testing import assert_same_bits, emulators
from tests.contract.test_repack import assert_same_weight
from tests.example_counts import at_most
from tests.kernel_formats.fp4_layers import (
    BRAIN,
    GENERATIONS,
    HALF,
    KINDS,
    NVFP4,
    lanes_read,
    mxfp4,
    nvfp4,
    pack,
)

EACH = pytest.mark.parametrize("layout", GENERATIONS)
BOTH = pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)


# A block by hand: 128 inputs, 64 outputs.


def test_eight_codes_of_a_lane_are_a_word() -> None:
    """Lane 0 has rows 0, 1, 8, 9 of columns 0 and 8; the even row of each pair is in the low half."""
    codes = torch.zeros(64, 128, dtype=torch.uint8)
    places = [(0, 0), (8, 0), (0, 8), (8, 8), (1, 0), (9, 0), (1, 8), (9, 8)]
    for nibble, (k, n) in enumerate(places):
        codes[n, k] = nibble + 1

    for weight in (nvfp4(torch.ones(64, 8), codes), mxfp4(torch.full((64, 4), 127), codes)):
        packed = pack(weight)
        assert int(packed.qweight[0, 0]) % 2**32 == 0x87654321
        assert packed.qweight.count_nonzero() == 1


COLUMNS = [
    0,
    16,
    8,
    24,
    32,
    48,
    40,
    56,
]  # of a lane's eight, which are 8 apart, the middle two of four swapped


EXPONENTS = (torch.arange(4) * 64 + torch.arange(64)[:, None]).clamp(max=254)  # 64 * group + column


def test_two_groups_of_a_lanes_columns_are_sixteen_bytes() -> None:
    packed = pack(mxfp4(EXPONENTS))
    stored = packed.scales.view(torch.uint8)

    assert (tuple(packed.scales.shape), packed.scales.dtype) == ((4, 64), torch.float8_e8m0fnu)
    assert stored[0, :32].tolist() == [*COLUMNS, *[64 + n for n in COLUMNS], *[n + 1 for n in COLUMNS],
                                       *[65 + n for n in COLUMNS]]  # fmt: skip
    assert stored[1, :8].tolist() == [4 + n for n in COLUMNS]  # columns 4 and up
    assert stored[2, :8].tolist() == [128 + n for n in COLUMNS]


def test_in_vllm_0_33_a_group_of_a_lanes_columns_is_eight_bytes() -> None:
    packed = pack(mxfp4(EXPONENTS), layout="marlin_vllm_0_33")
    stored = packed.scales.view(torch.uint8)

    assert (tuple(packed.scales.shape), packed.scales.dtype) == ((4, 64), torch.float8_e8m0fnu)
    assert stored[0].tolist() == [n + lane for lane in range(8) for n in COLUMNS]
    assert stored[1, :16].tolist() == [64 + n for n in COLUMNS] + [65 + n for n in COLUMNS]
    assert stored[2, :8].tolist() == [128 + n for n in COLUMNS]


S0E5M3 = {  # byte of 2**7 times the scale: five bits of exponent, with a bias of 15, and three of mantissa
    0.0: 0b00000_000,
    2.0**-6: 0b10000_000,
    0.4375: 0b10100_110,
    1.0: 0b10110_000,
    448.0: 0b11110_110,
}


@BOTH
def test_scales_of_nvfp4_are_seven_powers_larger_without_their_sign(dtype: torch.dtype) -> None:
    values = list(S0E5M3)
    scales = torch.tensor(values).repeat_interleave(16)[:64, None].expand(64, 8).contiguous()

    packed = pack(nvfp4(torch.cat([scales, torch.ones(64 - len(scales), 8)])), dtype)

    assert (tuple(packed.scales.shape), packed.scales.dtype) == ((8, 64), torch.float8_e4m3fn)
    column = packed.scales.view(torch.uint8)[0, [0, 2, 1, 3]]  # columns 0, 8, 16, 24
    assert column.tolist() == [S0E5M3[values[n // 16]] for n in (0, 8, 16, 24)]
    assert set(packed.scales.view(torch.uint8).flatten().tolist()) == {*list(S0E5M3.values())[:4]}


def test_the_highest_scale_of_nvfp4_has_a_byte() -> None:
    packed = pack(nvfp4(torch.full((64, 8), 448.0)))

    assert set(packed.scales.view(torch.uint8).flatten().tolist()) == {S0E5M3[448.0]}


@pytest.mark.parametrize(("dtype", "power"), [(HALF, 14 - 7), (BRAIN, 126 - 7)], ids=str)
@pytest.mark.parametrize(("kind", "second"), [(ModelOptNVFP4Weight, 0.25), (CTNVFP4Weight, 4.0)])
def test_the_global_scale_includes_the_kernel_factor(
    kind: Any, second: float, dtype: torch.dtype, power: int
) -> None:
    packed = pack(nvfp4(torch.ones(64, 8), second=second, kind=kind), dtype)

    assert packed.global_scale is not None
    assert packed.global_scale.dtype == dtype
    assert packed.global_scale.tolist() == [0.25 * 2.0**power]
    assert packed.second_scale is not None
    assert packed.second_scale.tolist() == [second]


# Values of the bytes, and the restore.


@st.composite
def sound(draw: st.DrawFn, *, plain: bool = False) -> Weight:
    """Draw a layer with scales in every kernel's range; `plain`: with few bits in the second scale."""
    N, groups = draw(st.sampled_from([1, 64, 72, 200])), draw(st.sampled_from([1, 5, 8]))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    kind = draw(st.sampled_from([CTMXFP4Weight, *KINDS]))
    size = 32 if kind is CTMXFP4Weight else 16
    codes = torch.randint(16, (N, size * groups), generator=noise)
    if kind is CTMXFP4Weight:
        return mxfp4(torch.randint(1 if plain else 0, 255, (N, groups), generator=noise), codes)
    least, most = draw(st.sampled_from([(2.0**-6, 1.0), (2.0**-6, 447.0), (0.0, 1.0), (0.0, 2.0**-6)]))
    scales = least + torch.rand(N, groups, generator=noise) * most
    scales *= torch.randint(5, (N, groups), generator=noise) > 0
    few = 0.75 if kind is ModelOptNVFP4Weight else 0.5
    second = few if plain else float(torch.rand((), generator=noise) + 0.1)
    return nvfp4(scales, codes, second, kind)  # type: ignore[no-any-return]


@EACH
@BOTH
@given(weight=sound())
@at_most(30)
def test_a_repacked_weight_has_equal_values_and_is_restored(
    layout: str, dtype: torch.dtype, weight: Weight
) -> None:
    if isinstance(weight, CTMXFP4Weight) and dtype == HALF:
        with pytest.raises(RepackError, match="powers of two with bfloat16 alone, got float16"):
            pack(weight, dtype, layout)
        return

    packed = pack(weight, dtype, layout)

    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_bits(packed.codes().plain().int(), weight.codes().plain().int())
    assert_same_weight(restore(packed), weight)


@EACH
@given(weight=sound(plain=True), dtype=st.sampled_from([HALF, BRAIN]))
@at_most(30)
def test_a_kernels_lanes_read_the_weight(layout: str, weight: Weight, dtype: torch.dtype) -> None:
    packed = pack(weight, BRAIN if isinstance(weight, CTMXFP4Weight) else dtype, layout)
    N, K = weight.shape

    read = lanes_read(packed)

    assert_same_bits(read[:K, :N].T.contiguous(), weight.dequantize())
    assert not read[K:].any()
    assert not read[:, N:].any()


def test_an_exponent_of_0_is_restored_although_the_kernel_reads_0() -> None:
    weight = mxfp4(torch.zeros(64, 4))

    packed = pack(weight)

    assert float(packed.dequantize().max()) == 6 * 2.0**-127
    assert not emulators.fp4_marlin_weight(packed.qweight, packed.scales).any()
    assert_same_weight(restore(packed), weight)


def test_bytes_at_an_odd_address_are_repacked() -> None:
    weight = nvfp4(torch.ones(64, 8))
    odd = torch.empty(weight.weight.numel() + 1, dtype=torch.uint8)[1:].view_as(weight.weight)
    odd.copy_(weight.weight)

    packed = pack(ModelOptNVFP4Weight(**{**weight.fields(), "weight": odd}, config=weight.config))

    assert_same_bits(packed.qweight, pack(weight).qweight)


def test_a_repacked_weight_is_repacked_for_other_activations() -> None:
    weight = nvfp4(torch.ones(64, 8))

    again = repack(pack(weight, HALF), "marlin", dtype=BRAIN)

    assert_same_weight(again, pack(weight, BRAIN))
    assert again.layer == pack(weight, BRAIN).layer


@NVFP4
def test_scales_of_activations_are_repacked_and_restored(kind: Any) -> None:
    name = "input_global_scale" if kind is CTNVFP4Weight else "input_scale"
    weight = nvfp4(torch.ones(64, 8), kind=kind, **{name: torch.tensor([3.0])})

    packed = pack(weight)

    assert packed.input_scale is not None
    assert packed.input_scale.tolist() == [3.0]
    assert_same_weight(restore(packed), weight)


@NVFP4
def test_fused_parts_with_equal_second_scales_share_one(kind: Any) -> None:
    layer = Layer((24, 40), 128, (64, 128), "gate_up")
    weight = nvfp4(torch.ones(64, 8), second=[0.5, 0.5], kind=kind, layer=layer)

    packed = pack(weight)

    assert packed.global_scale is not None
    assert packed.global_scale.numel() == 1
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_weight(restore(packed), weight)


# Small scales, raised for bfloat16.


RAISED = [
    (2.0**-6, 448.0, 0), (1.5 * 2**-7, 240.0, 1), (2.0**-7, 1.0, 1), (3 * 2.0**-9, 1.0, 2),
    (2.0**-8, 112.0, 2), (2.0**-9, 60.0, 3),
]  # fmt: skip


@pytest.mark.parametrize(("lowest", "highest", "power"), RAISED)
def test_scales_are_raised_into_the_range_of_bfloat16(lowest: float, highest: float, power: int) -> None:
    scales = torch.full((64, 8), highest)
    scales[3, 5], scales[4, 1] = lowest, 0
    weight = nvfp4(scales)

    packed, half = pack(weight), pack(weight, HALF)

    assert packed.config == half.config
    assert packed.global_scale is not None
    assert packed.global_scale.tolist() == [0.5 * 2.0 ** (119 - power)]
    assert half.global_scale is not None
    assert half.global_scale.tolist() == [0.5 * 2.0**7]
    for each in (packed, half):
        read = emulators.fp4_marlin_weight(each.qweight, each.scales, each.global_scale)
        assert_same_bits(read.T.contiguous(), weight.dequantize())
        assert_same_bits(each.dequantize(), weight.dequantize())
        assert_same_weight(restore(each), weight)


RAISED_IN_VLLM_0_33 = [
    (2.0**-6, 448.0, 0), (2.0**-6, 240.0, 0), (1.5 * 2**-7, 240.0, 1), (2.0**-6, 224.0, 1), (2.0**-7, 1.0, 8),
    (0.25, 1.0, 8), (2.0**-9, 60.0, 3), (2.0**-9, 52.0, 3), (2.0**-9, 2.0**-9, 17),
]  # fmt: skip


@pytest.mark.parametrize(("lowest", "highest", "power"), RAISED_IN_VLLM_0_33)
def test_vllm_0_33_raises_scales_until_the_highest_is_above_224(
    lowest: float, highest: float, power: int
) -> None:
    """qload raises once more if the lowest needs it: with 240, vLLM writes 1.5 * 2**-7 as 0."""
    scales = torch.full((64, 8), highest)
    scales[3, 5], scales[4, 1] = lowest, 0
    weight = nvfp4(scales)

    packed, half = (pack(weight, dtype, "marlin_vllm_0_33") for dtype in (BRAIN, HALF))

    for each, factor in ((packed, 0.5 * 2.0 ** (119 - power)), (half, 0.5 * 2.0**7)):
        assert each.global_scale is not None
        assert (each.global_scale.dtype, each.global_scale.tolist()) == (torch.float32, [factor])
        assert_same_bits(lanes_read(each).T.contiguous(), weight.dequantize())
        assert_same_bits(each.dequantize(), weight.dequantize())
        assert_same_weight(restore(each), weight)


@EACH
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.format)
def test_scales_that_are_all_0_are_not_raised(layout: str, kind: Any) -> None:
    weight = nvfp4(torch.zeros(64, 8), kind=kind)

    packed = pack(weight, BRAIN, layout)

    assert packed.global_scale is not None
    assert packed.global_scale.tolist() == [(0.5 if kind is ModelOptNVFP4Weight else 2.0) * 2.0**119]
    assert_same_weight(restore(packed), weight)


# Two generations of one kernel.


def test_marlin_is_the_order_of_vllm_0_11() -> None:
    for weight in (nvfp4(torch.ones(64, 8)), mxfp4(EXPONENTS)):
        assert_same_weight(pack(weight, layout="marlin"), pack(weight, layout="marlin_vllm_0_11"))


def test_the_emulator_of_the_other_generation_reads_another_weight() -> None:
    """MXFP4 has equal dtypes and shapes in both generations, but other values."""
    weight = mxfp4(EXPONENTS)
    old, new = (pack(weight, layout=layout) for layout in GENERATIONS)
    want = weight.dequantize().T

    swapped = [
        emulators.fp4_marlin_vllm_0_33_weight(old.qweight, old.scales, dtype=BRAIN),
        emulators.fp4_marlin_weight(new.qweight, new.scales),
    ]

    for read in swapped:
        wrong = (read != want).float().mean()
        assert wrong > 0.5


@pytest.mark.usefixtures("seen_texts")
@BOTH
def test_an_emulator_refuses_the_global_scale_of_the_other_generation(dtype: torch.dtype) -> None:
    old, new = (pack(nvfp4(torch.ones(64, 8)), dtype, layout) for layout in GENERATIONS)

    with pytest.raises(ValueError, match=r"vLLM 0\.33's kernel takes a global scale in float32, got torch"):
        emulators.fp4_marlin_vllm_0_33_weight(old.qweight, old.scales, old.global_scale, dtype=dtype)
    with pytest.raises(
        ValueError, match=r"0\.11's kernel takes .* of the activations' dtype, got torch\.float32"
    ):
        emulators.fp4_marlin_weight(new.qweight, new.scales, new.global_scale)
    with pytest.raises(ValueError, match=r"MXFP4 with bfloat16, got torch\.float16"):
        emulators.fp4_marlin_vllm_0_33_weight(new.qweight, new.scales, dtype=HALF)


@EACH
def test_one_generation_is_repacked_for_the_other(layout: str) -> None:
    weight = nvfp4(torch.rand(64, 8, generator=torch.Generator().manual_seed(0)) + 2.0**-6, second=0.75)
    other = next(each for each in GENERATIONS if each != layout)

    again = repack(pack(weight, HALF, layout), other, dtype=BRAIN)

    assert_same_weight(again, pack(weight, BRAIN, other))
    assert again.layer == pack(weight, BRAIN, other).layer


@BOTH
@pytest.mark.parametrize("lowest", [1.0, 2.0**-9])
def test_a_second_scale_of_0_gives_weights_of_0_and_is_restored(lowest: float, dtype: torch.dtype) -> None:
    scales = torch.ones(64, 8)
    scales[1, 1] = lowest
    weight = nvfp4(scales, second=0.0)

    packed = pack(weight, dtype)

    assert not emulators.fp4_marlin_weight(packed.qweight, packed.scales, packed.global_scale).any()
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_weight(restore(packed), weight)


def test_an_unraised_small_scale_vanishes_with_bfloat16() -> None:
    """The kernel reads the byte of 2**-7 as 2**-112 with bfloat16."""
    half = pack(nvfp4(torch.full((64, 8), 2.0**-7), second=1.0), HALF)

    read = emulators.fp4_marlin_weight(half.qweight, half.scales, torch.tensor([2.0**119]).bfloat16())

    assert float(read.max()) == 6 * 2.0**-112 * 2.0**-7
