"""Four-bit floats in Marlin's order: a block by hand, the way back, shares, and what is refused."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload.errors import ArgumentError, RepackError, ShapeError
from qload.formats import CTMXFP4Weight, CTNVFP4Weight, ModelOptNVFP4Weight, MXFP4Config, NVFP4Config
from qload.kernel_formats import Fp4MarlinConfig, Fp4MarlinWeight, repack, restore
from qload.layouts import fp4
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld
from qload.repacking import RepackingLoader
from qload.spec import Layer, Weight
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits, emulators, layers
from qload.weights import Weights
from tests.contract.test_repack import assert_same_weight
from tests.example_counts import at_most

HALF, BRAIN = torch.float16, torch.bfloat16
BOTH = pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
KINDS: dict[Any, tuple[str, str]] = {
    CTNVFP4Weight: ("weight_packed", "weight_global_scale"),
    ModelOptNVFP4Weight: ("weight", "weight_scale_2"),
}
NVFP4 = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.format)


def codes_of(N: int, K: int) -> Tensor:
    """Codes (N, K) that count, no two rows alike."""
    return (torch.arange(K) + torch.arange(N)[:, None] * 5 + torch.arange(K) // 16) % 16


def nvfp4(
    scales: Tensor,
    codes: Tensor | None = None,
    second: Any = 0.5,
    kind: Any = ModelOptNVFP4Weight,
    **more: Any,
) -> Any:
    """A layer with these scales (N, K / 16), and one second scale, or one a part."""
    packed, name = KINDS[kind]
    N, K = scales.shape[0], 16 * scales.shape[1]
    held = {
        packed: fp4.pack(codes_of(N, K) if codes is None else codes),
        "weight_scale": scales.to(torch.float8_e4m3fn),
        name: torch.tensor(second).reshape(-1),
    }
    return kind(config=NVFP4Config(), **held, **more)


def mxfp4(exponents: Tensor, codes: Tensor | None = None, **more: Any) -> CTMXFP4Weight:
    """A layer with these exponents (N, K / 32)."""
    N, K = exponents.shape[0], 32 * exponents.shape[1]
    packed = fp4.pack(codes_of(N, K) if codes is None else codes)
    exponents = exponents.to(torch.uint8)
    return CTMXFP4Weight(config=MXFP4Config(), weight_packed=packed, weight_scale=exponents, **more)


def pack(weight: Weight, dtype: torch.dtype = BRAIN) -> Fp4MarlinWeight:
    made = repack(weight, "marlin", dtype=dtype)
    assert isinstance(made, Fp4MarlinWeight)
    return made


# A block by hand: 128 inputs, 64 outputs.


def test_eight_codes_of_a_lane_are_a_word() -> None:
    """Lane 0 has rows 0, 1, 8, 9 of columns 0 and 8; the even rows of a pair fill the low half."""
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


def test_two_groups_of_a_lanes_columns_are_sixteen_bytes() -> None:
    """Exponents that say group and column: 64 * group + column."""
    exponents = torch.arange(4) * 64 + torch.arange(64)[:, None]

    packed = pack(mxfp4(exponents.clamp(max=254)))
    stored = packed.scales.view(torch.uint8)

    assert (tuple(packed.scales.shape), packed.scales.dtype) == ((4, 64), torch.float8_e8m0fnu)
    assert stored[0, :32].tolist() == [*COLUMNS, *[64 + n for n in COLUMNS], *[n + 1 for n in COLUMNS],
                                       *[65 + n for n in COLUMNS]]  # fmt: skip
    assert stored[1, :8].tolist() == [4 + n for n in COLUMNS]  # half of eight times eight columns on
    assert stored[2, :8].tolist() == [128 + n for n in COLUMNS]


S0E5M3 = {  # of 2**7 times the scale: five bits of exponent, whose bias is 15, and three of mantissa
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
def test_the_global_scale_has_what_the_kernel_lacks(
    kind: Any, second: float, dtype: torch.dtype, power: int
) -> None:
    packed = pack(nvfp4(torch.ones(64, 8), second=second, kind=kind), dtype)

    assert packed.global_scale is not None
    assert packed.global_scale.dtype == dtype
    assert packed.global_scale.tolist() == [0.25 * 2.0**power]
    assert packed.second_scale is not None
    assert packed.second_scale.tolist() == [second]


# What the bytes mean, and the way back.


@st.composite
def sound(draw: st.DrawFn, *, plain: bool = False) -> Weight:
    """A layer of any shape whose scales every kernel reads; `plain`: with a second scale of few bits."""
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


@BOTH
@given(weight=sound())
@at_most(30)
def test_a_repacked_weight_means_the_same_and_goes_back(dtype: torch.dtype, weight: Weight) -> None:
    if isinstance(weight, CTMXFP4Weight) and dtype == HALF:
        with pytest.raises(RepackError, match="powers of two with bfloat16 alone, got float16"):
            pack(weight, dtype)
        return

    packed = pack(weight, dtype)

    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_bits(packed.codes().plain().int(), weight.codes().plain().int())
    assert_same_weight(restore(packed), weight)


@given(weight=sound(plain=True), dtype=st.sampled_from([HALF, BRAIN]))
@at_most(30)
def test_a_kernels_lanes_read_the_weight(weight: Weight, dtype: torch.dtype) -> None:
    packed = pack(weight, BRAIN if isinstance(weight, CTMXFP4Weight) else dtype)
    N, K = weight.shape

    read = emulators.fp4_marlin_weight(packed.qweight, packed.scales, packed.global_scale)

    assert_same_bits(read[:K, :N].T.contiguous(), weight.dequantize())
    assert not read[K:].any()
    assert not read[:, N:].any()


def test_an_exponent_of_0_is_kept_although_the_kernel_reads_0() -> None:
    weight = mxfp4(torch.zeros(64, 4))

    packed = pack(weight)

    assert float(packed.dequantize().max()) == 6 * 2.0**-127
    assert not emulators.fp4_marlin_weight(packed.qweight, packed.scales).any()
    assert_same_weight(restore(packed), weight)


def test_bytes_at_an_odd_place_in_memory_are_read() -> None:
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
def test_scales_of_activations_go_along(kind: Any) -> None:
    name = "input_global_scale" if kind is CTNVFP4Weight else "input_scale"
    weight = nvfp4(torch.ones(64, 8), kind=kind, **{name: torch.tensor([3.0])})

    packed = pack(weight)

    assert packed.input_scale is not None
    assert packed.input_scale.tolist() == [3.0]
    assert_same_weight(restore(packed), weight)


@NVFP4
def test_fused_parts_with_one_second_scale_are_one(kind: Any) -> None:
    layer = Layer((24, 40), 128, (64, 128), "gate_up")
    weight = nvfp4(torch.ones(64, 8), second=[0.5, 0.5], kind=kind, layer=layer)

    packed = pack(weight)

    assert packed.global_scale is not None
    assert packed.global_scale.numel() == 1
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_weight(restore(packed), weight)


# Scales that bfloat16 does not read unless they are raised.


RAISED = [
    (2.0**-6, 448.0, 0), (1.5 * 2**-7, 240.0, 1), (2.0**-7, 1.0, 1), (3 * 2.0**-9, 1.0, 2),
    (2.0**-8, 112.0, 2), (2.0**-9, 60.0, 3),
]  # fmt: skip


@pytest.mark.parametrize(("lowest", "highest", "power"), RAISED)
def test_scales_are_raised_to_what_bfloat16_reads(lowest: float, highest: float, power: int) -> None:
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


@BOTH
@pytest.mark.parametrize("lowest", [1.0, 2.0**-9])
def test_a_second_scale_of_0_makes_all_0_and_keeps_the_others(lowest: float, dtype: torch.dtype) -> None:
    scales = torch.ones(64, 8)
    scales[1, 1] = lowest
    weight = nvfp4(scales, second=0.0)

    packed = pack(weight, dtype)

    assert not emulators.fp4_marlin_weight(packed.qweight, packed.scales, packed.global_scale).any()
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_weight(restore(packed), weight)


def test_a_scale_that_is_not_raised_is_nothing_to_bfloat16() -> None:
    """Why it is: the kernel reads the byte of 2**-7 as 2**-112."""
    half = pack(nvfp4(torch.full((64, 8), 2.0**-7), second=1.0), HALF)

    read = emulators.fp4_marlin_weight(half.qweight, half.scales, torch.tensor([2.0**119]).bfloat16())

    assert float(read.max()) == 6 * 2.0**-112 * 2.0**-7


# Shares.


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("split", ["col", "row"])
@pytest.mark.parametrize("kind", [*KINDS, CTMXFP4Weight], ids=lambda kind: kind.format)
@given(data=st.data())
@at_most(5)
def test_a_share_of_the_repack_is_the_repack_of_the_share(
    kind: Any, split: str, world: int, data: Any
) -> None:
    """N and K of shares that need no padding; scales are cut where two groups are a pair."""
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    N, K = 64 * world, 128 * world
    codes = torch.randint(16, (N, K), generator=noise)
    if kind is CTMXFP4Weight:
        weight: Any = mxfp4(torch.randint(100, 140, (N, K // 32), generator=noise), codes)
    else:
        scales = torch.rand(N, K // 16, generator=noise) + 2.0 ** -data.draw(st.sampled_from([0, 9]))
        weight = nvfp4(scales, codes, kind=kind)
    whole, shares = pack(weight), loaded(weight, split, world)

    for rank, share in enumerate(shares):
        words, scales = whole.qweight, whole.scales.view(torch.uint8)
        G = scales.shape[0]
        pairs, held = scales.reshape(G // 2, 2 * N), share.scales.view(torch.uint8)
        axis = 1 if split == "col" else 0
        assert_same_bits(share.qweight, words.chunk(world, axis)[rank].contiguous())
        assert_same_bits(held, pairs.chunk(world, axis)[rank].contiguous().reshape(held.shape))
        assert share.config == whole.config
        if whole.global_scale is not None:
            assert_same_bits(share.global_scale, whole.global_scale)
        assert_same_bits(share.dequantize(), weight.dequantize().chunk(world, 1 - axis)[rank].contiguous())
        mine = restore(share)
        assert type(mine) is kind
        assert_same_bits(mine.dequantize(), share.dequantize())


def loaded(weight: Weight, split: str, world: int, dtype: torch.dtype = BRAIN) -> list[Any]:
    """Each rank's share, repacked while it is loaded."""
    inner = FormatLoader(ConfiguredFormat(type(weight), weight.config))
    loader = RepackingLoader(inner, "marlin", dtype=dtype)
    storage = MemoryStorage({f"a.{name}": tensor for name, tensor in weight.fields().items()})
    ranks = [Weights(storage, loader=loader, process_group=rank) for rank in FakeWorld(world)]
    return [getattr(each, f"get_weights_{split}")("a") for each in ranks]


@pytest.mark.parametrize("split", ["col", "row"])
def test_one_rank_whose_scale_is_small_has_all_raise_theirs(split: str) -> None:
    scales = torch.ones(128, 16)
    scales[0, 0] = 2.0**-8

    shares = loaded(nvfp4(scales), split, 2)

    assert [float(share.global_scale) for share in shares] == [0.5 * 2.0 ** (119 - 2)] * 2


@NVFP4
@pytest.mark.parametrize("second", [0.5, 0.75])
def test_layers_fused_while_they_are_loaded_need_one_second_scale(kind: Any, second: float) -> None:
    parts = [nvfp4(torch.ones(64, 8), kind=kind), nvfp4(torch.ones(64, 8), second=second, kind=kind)]
    held = {f"{i}.{name}": t for i, part in enumerate(parts) for name, t in part.fields().items()}
    inner = FormatLoader(ConfiguredFormat(kind, NVFP4Config()))
    loader = RepackingLoader(inner, "marlin", strict=False, dtype=BRAIN)

    got = Weights(MemoryStorage(held), loader=loader).get_multi_weights_col(["0", "1"])

    assert type(got) is (Fp4MarlinWeight if second == 0.5 else kind)
    assert_same_bits(got.dequantize(), torch.cat([part.dequantize() for part in parts]))


# What cannot be said.


def changed(value: float, at: tuple[int, int] = (3, 5)) -> Tensor:
    scales = torch.ones(64, 8)
    scales[at] = value
    return scales


REFUSED = [
    pytest.param(
        nvfp4(changed(-0.5)), BRAIN,
        "1 of 512 scales of modelopt_nvfp4.weight_scale are negative, and Marlin's have no sign: the first, "
        "of output 3 and group 5, is -0.5", id="negative",
    ),
    pytest.param(nvfp4(changed(-0.0)), HALF, "no sign: .* is -0", id="negative zero"),
    pytest.param(nvfp4(changed(float("nan"))), HALF, "1 of 512 scales .* are NaN", id="NaN"),
    pytest.param(
        mxfp4(torch.tensor([[127, 255]]).expand(64, 2)), BRAIN,
        "64 of 128 scales of ct_mxfp4.weight_scale are NaN: .* output 0 and group 1", id="an exponent of 255",
    ),
    pytest.param(
        nvfp4(torch.where(changed(0) > 0, 64.0, 2.0**-9)), BRAIN,
        "weight_scale goes from 0.00195312 to 64; .* 0.015625 to below 512, .* repack for float16",
        id="too wide a range for bfloat16",
    ),
    pytest.param(
        nvfp4(torch.ones(64, 8), second=2.0**9), BRAIN,
        r"weight_scale_2 of 512 times 2\*\*119 overflows or loses bits as bfloat16", id="overflows bfloat16",
    ),
    pytest.param(
        nvfp4(torch.ones(64, 8), second=600.0), HALF, r"of 600 times 2\*\*7 .* as float16",
        id="overflows float16",
    ),
    pytest.param(
        nvfp4(torch.ones(64, 8), second=1.01 * 2.0**-24), HALF, "loses bits as float16", id="a subnormal",
    ),
    pytest.param(
        nvfp4(torch.ones(64, 8), second=0.0, kind=CTNVFP4Weight), BRAIN,
        "1 / ct_nvfp4.weight_global_scale of 0 times", id="divided by 0",
    ),
    pytest.param(nvfp4(torch.ones(64, 8), second=float("nan")), BRAIN, "_2 of nan times", id="NaN for all"),
    pytest.param(
        nvfp4(torch.ones(64, 8), second=[0.5, 0.75], layer=Layer((32, 32), 128, (64, 128), "qk")), BRAIN,
        r"qk.weight_scale_2 differs between fused parts \(0.5, 0.75\)", id="parts that differ",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("weight", "dtype", "text"), REFUSED)
def test_what_the_kernel_would_misread_is_refused(weight: Weight, dtype: torch.dtype, text: str) -> None:
    with pytest.raises(RepackError, match=text) as caught:
        pack(weight, dtype)

    assert caught.value.source == weight.format


@pytest.mark.parametrize("weight", [nvfp4(torch.ones(64, 8)), mxfp4(torch.ones(64, 4))])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_dtype_of_the_activations_has_to_be_said(weight: Weight, dtype: Any) -> None:
    with pytest.raises(ArgumentError, match=r"torch\.float16 or torch\.bfloat16, as the"):
        pack(weight, dtype)


def test_fp4_knows_no_dialect_of_fp8() -> None:
    with pytest.raises(ArgumentError, match="exponent_bias\n  expected None, as only fp8 to marlin"):
        repack(nvfp4(torch.ones(64, 8)), "marlin", dtype=BRAIN, exponent_bias=True)


def test_what_was_made_by_hand_is_refused_and_never_itself() -> None:
    made = pack(nvfp4(torch.ones(64, 8)))
    by_hand = Fp4MarlinWeight(config=made.config, layer=Layer((64,), 128, (64, 128)), **made.fields())

    assert_same_bits(by_hand.dequantize(), made.dequantize())
    with pytest.raises(RepackError, match="made by hand"):
        restore(by_hand)


def test_scales_of_an_odd_number_of_groups_are_refused() -> None:
    made = pack(nvfp4(torch.ones(64, 8)))

    with pytest.raises(ShapeError, match="scales"):
        Fp4MarlinWeight(config=made.config, **{**made.fields(), "scales": made.scales[:7]})


@pytest.mark.parametrize("group", [0, -1, 64])
def test_a_config_that_no_kernel_reads_is_refused(group: int) -> None:
    with pytest.raises(ArgumentError, match="fp4_marlin: group_size"):
        Fp4MarlinConfig(group)


@given(data=st.data(), dtype=st.sampled_from([HALF, BRAIN]))
@at_most(40)
def test_any_drawn_layer_is_held_exactly_or_refused(data: Any, dtype: torch.dtype) -> None:
    kind = data.draw(st.sampled_from([CTMXFP4Weight, *KINDS]))
    config = MXFP4Config() if kind is CTMXFP4Weight else NVFP4Config()
    weight = data.draw(layers(kind, st.just(config), K=96, most=2)).weight()
    try:
        packed = pack(weight, dtype)
    except RepackError:
        assert not can_say(weight, dtype)
        return

    assert can_say(weight, dtype)
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_weight(restore(packed), weight)


def can_say(weight: Any, dtype: torch.dtype) -> bool:
    """Whether a kernel reads a weight: from what its bytes mean to it, not from the product."""
    stored = weight.weight_scale.view(torch.uint8)
    if isinstance(weight, CTMXFP4Weight):
        return dtype == BRAIN and not bool((stored == 255).any())
    if bool((stored >= 0x7F).any()):
        return False
    second = weight.fields()[KINDS[type(weight)][1]].double()
    factor = float(1 / second if isinstance(weight, CTNVFP4Weight) else second)
    held = weight.weight_scale.float()[stored > 0]
    for power in range(4) if dtype == BRAIN else (0,):
        if dtype == BRAIN and held.numel():
            if float(held.min()) * 2**power < 2.0**-6:
                continue
            if float(held.max()) * 2**power >= 512:
                return False
        exact = torch.tensor(abs(factor) * 2.0 ** (7 if dtype == HALF else 119 - power), dtype=torch.float64)
        got = exact.to(dtype)
        normal = float(exact) >= torch.finfo(dtype).tiny or bool(got == exact)
        return normal and bool(got.isfinite())
    return False
