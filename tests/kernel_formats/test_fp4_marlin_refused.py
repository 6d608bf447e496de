"""Four-bit floats that Marlin's order cannot represent, or its kernel would misread."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload.errors import ArgumentError, RepackError, ShapeError
from qload.formats import CTMXFP4Weight, CTNVFP4Weight, MXFP4Config, NVFP4Config
from qload.kernel_formats import Fp4MarlinConfig, Fp4MarlinVllm033Config, Fp4MarlinWeight, repack, restore
from qload.spec import Layer, Weight
from qload.testing import assert_same_bits, layers
from tests.contract.test_repack import assert_same_weight
from tests.example_counts import at_most
from tests.kernel_formats.fp4_layers import BRAIN, HALF, KINDS, mxfp4, nvfp4, pack


def changed(value: float, at: tuple[int, int] = (3, 5)) -> Tensor:
    scales = torch.ones(64, 8)
    scales[at] = value
    return scales


REFUSED = [
    pytest.param(
        nvfp4(changed(-0.5)), BRAIN,
        "1 of 512 scales of modelopt_nvfp4.weight_scale are negative, and the kernel's have no sign: "
        "the first, of output 3 and group 5, is -0.5", id="negative",
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


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(("weight", "dtype", "text"), REFUSED)
def test_scales_beyond_the_kernel_are_refused(weight: Weight, dtype: torch.dtype, text: str) -> None:
    with pytest.raises(RepackError, match=text) as caught:
        pack(weight, dtype)

    assert caught.value.source == weight.format
    assert caught.value.layout == "marlin_vllm_0_11"


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("weight", [nvfp4(torch.ones(64, 8)), mxfp4(torch.ones(64, 4))])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_dtype_of_the_activations_is_required(weight: Weight, dtype: Any) -> None:
    with pytest.raises(ArgumentError, match=r"torch\.float16 or torch\.bfloat16, as the"):
        pack(weight, dtype)


@pytest.mark.usefixtures("seen_texts")
def test_fp4_takes_no_option_of_fp8() -> None:
    with pytest.raises(ArgumentError, match="exponent_bias\n  expected None, as only fp8 to marlin"):
        repack(nvfp4(torch.ones(64, 8)), "marlin", dtype=BRAIN, exponent_bias=True)


@pytest.mark.usefixtures("seen_texts")
def test_a_weight_built_by_hand_is_not_restored() -> None:
    packed = pack(nvfp4(torch.ones(64, 8)))
    by_hand = Fp4MarlinWeight(config=packed.config, layer=Layer((64,), 128, (64, 128)), **packed.fields())

    assert_same_bits(by_hand.dequantize(), packed.dequantize())
    with pytest.raises(RepackError, match="built by hand"):
        restore(by_hand)


@pytest.mark.usefixtures("seen_texts")
def test_scales_of_an_odd_number_of_groups_are_refused() -> None:
    packed = pack(nvfp4(torch.ones(64, 8)))

    with pytest.raises(ShapeError, match="scales"):
        Fp4MarlinWeight(config=packed.config, **{**packed.fields(), "scales": packed.scales[:7]})


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("group", [0, -1, 64])
def test_a_config_of_other_groups_is_refused(group: int) -> None:
    with pytest.raises(ArgumentError, match="fp4_marlin_vllm_0_11: group_size"):
        Fp4MarlinConfig(group)


ROUNDED_BY_VLLM_0_11 = {"overflows bfloat16", "overflows float16", "a subnormal"}
OF_VLLM_0_33 = [
    *(case for case in REFUSED if case.id not in ROUNDED_BY_VLLM_0_11),
    pytest.param(
        nvfp4(torch.ones(64, 8), second=2.0**17), BRAIN, r"of 131072 times 2\*\*111 .* bits as float32",
        id="overflows",
    ),
]  # fmt: skip


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(("weight", "dtype", "text"), OF_VLLM_0_33)
def test_vllm_0_33_refuses_the_same_except_roundings_of_the_second_scale(
    weight: Weight, dtype: torch.dtype, text: str
) -> None:
    with pytest.raises(RepackError, match=text) as caught:
        pack(weight, dtype, "marlin_vllm_0_33")

    assert caught.value.layout == "marlin_vllm_0_33"


@pytest.mark.parametrize(
    ("second", "dtype", "power"), [(600.0, HALF, 7), (1.01 * 2.0**-24, HALF, 7), (512.0, BRAIN, 119 - 8)]
)
def test_vllm_0_33_takes_second_scales_beyond_16_bits(second: float, dtype: torch.dtype, power: int) -> None:
    weight = nvfp4(torch.ones(64, 8), second=second)

    packed = pack(weight, dtype, "marlin_vllm_0_33")

    assert packed.global_scale is not None
    assert packed.global_scale.item() == weight.weight_scale_2.item() * 2.0**power
    assert_same_bits(packed.dequantize(), weight.dequantize())


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_a_config_for_other_activations_is_refused(dtype: Any) -> None:
    with pytest.raises(ArgumentError, match="fp4_marlin_vllm_0_33: dtype"):
        Fp4MarlinVllm033Config(16, dtype=dtype)


@given(data=st.data(), dtype=st.sampled_from([HALF, BRAIN]))
@at_most(40)
def test_any_random_layer_is_exact_or_refused(data: Any, dtype: torch.dtype) -> None:
    kind = data.draw(st.sampled_from([CTMXFP4Weight, *KINDS]))
    config = MXFP4Config() if kind is CTMXFP4Weight else NVFP4Config()
    weight = data.draw(layers(kind, st.just(config), K=96, most=2)).weight()
    try:
        packed = pack(weight, dtype)
    except RepackError:
        assert not is_supported(weight, dtype)
        return

    assert is_supported(weight, dtype)
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_weight(restore(packed), weight)


def is_supported(weight: Any, dtype: torch.dtype) -> bool:
    """Return True if a kernel reads a weight exactly, by the values of its bytes."""
    stored = weight.weight_scale.view(torch.uint8)
    if isinstance(weight, CTMXFP4Weight):
        return dtype == BRAIN and not bool((stored == 255).any())
    if bool((stored >= 0x7F).any()):
        return False
    second = weight.fields()[KINDS[type(weight)][1]].double()
    factor = float(1 / second if isinstance(weight, CTNVFP4Weight) else second)
    nonzero = weight.weight_scale.float()[stored > 0]
    for power in range(4) if dtype == BRAIN else (0,):
        if dtype == BRAIN and nonzero.numel():
            if float(nonzero.min()) * 2**power < 2.0**-6:
                continue
            if float(nonzero.max()) * 2**power >= 512:
                return False
        exact = torch.tensor(abs(factor) * 2.0 ** (7 if dtype == HALF else 119 - power), dtype=torch.float64)
        got = exact.to(dtype)
        normal = float(exact) >= torch.finfo(dtype).tiny or bool(got == exact)
        return normal and bool(got.isfinite())
    return False
