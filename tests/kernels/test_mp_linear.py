"""Mixed-precision linear kernels: a yes is multiplied right, a no has a reason and cannot be made."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from qload.errors import ArgumentError, CastError, KernelRefusedError, NoKernelError, ShapeError
from qload.kernels import (
    KERNELS,
    DequantizeLinearKernel,
    ExllamaLinearKernel,
    MarlinLinearKernel,
    MPLinearKernel,
    ScalarType,
    StripsLinearKernel,
    choose_mp_linear_kernel,
    permute_param_layout_,
    scalar_types,
    warm_up,
)
from qload.layouts import STORED_MINUS_ONE, Stored, StoredMinusOnePerField, StoredMinusOneUnmasked
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.example_counts import at_most
from tests.kernels.mp_layers import Case, row_share

CASES = st.builds(
    Case,
    bits=st.sampled_from([2, 3, 4, 8]),
    group=st.sampled_from([-1, 16, 32, 48, 64, 96, 128, 192]),
    zeros=st.sampled_from(
        [None, Stored(), STORED_MINUS_ONE, StoredMinusOnePerField(), StoredMinusOneUnmasked()]
    ),
    act_order=st.booleans(),
    turned=st.booleans(),
    N=st.sampled_from([32, 64, 96]),
    K=st.sampled_from([160, 256, 288]),
    seed=st.integers(0, 99),
)
every_kernel = pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.name)


def prepare(kind: type[MPLinearKernel], case: Case, weight: Any) -> Any:
    """A prepared layer as a function of x."""
    layer = case.layer(weight)
    kernel = kind(case.config, "qweight", "scales", "qzeros", "g_idx")
    kernel.process_weights_after_loading(layer)
    warm_up(nn.ModuleList([layer]), 256)
    return lambda x, bias=None: kernel.apply_weights(layer, x, bias)


@every_kernel
@given(case=CASES, order=st.sampled_from(["gptq", "awq"]), M=st.sampled_from([1, 5]))
@at_most(60)
def test_a_yes_is_exact_and_a_no_cannot_be_made(
    kind: type[MPLinearKernel], case: Case, order: str, M: int
) -> None:
    case = replace(case, order=order if case.bits in (4, 8) and not case.act_order else "gptq")
    able, reason = kind.can_implement(case.config)
    if not able:
        with pytest.raises(KernelRefusedError) as caught:
            kind(case.config, "qweight", "scales", "qzeros", "g_idx")
        assert reason == caught.value.reason
        return

    weight, exact = case.weight(), case.weight(scale=1.0)

    assert_reads_back(prepare(kind, case, weight), weight, torch.float16)
    assert_sums_exactly(prepare(kind, case, exact), exact, torch.float16)
    x = torch.randn(M, case.K, generator=torch.Generator().manual_seed(case.seed)).half()
    assert_within_bound(prepare(kind, case, weight), weight, x)


@pytest.mark.parametrize("group", [16, 48, 96, 192])
def test_exllama_is_right_for_the_group_sizes_the_original_gets_wrong(group: int) -> None:
    case = Case(group=group, K=384)
    assert ExllamaLinearKernel.can_implement(case.config) == (True, None)
    refused = f"reads groups of 32, 64, 128, multiples of them, or one group, got {group}"
    cut = group % 32 == 0  # into groups of 32 rows or 64, several of which have one scale
    assert MarlinLinearKernel.can_implement(case.config) == (cut, None if cut else refused)

    assert_reads_back(prepare(ExllamaLinearKernel, case, case.weight()), case.weight(), torch.float16)


@pytest.mark.parametrize(
    ("bits", "words"), [(2, 0x55555555), (4, 0x77777777), (8, 0x7F7F7F7F)], ids=["2 bits", "4 bits", "8 bits"]
)
def test_exllama_writes_the_bias_minus_one_where_there_are_no_zero_points(bits: int, words: int) -> None:
    case = Case(bits=bits)
    layer = case.layer(case.weight())

    ExllamaLinearKernel(case.config, "qweight", "scales").process_weights_after_loading(layer)

    assert set(layer.qzeros.flatten().tolist()) == {words}


@pytest.mark.usefixtures("seen_texts")
@every_kernel
def test_a_type_that_says_no_meaning_is_not_implemented(kind: type[MPLinearKernel]) -> None:
    config = replace(Case().config, weight_type=scalar_types.uint4)

    with pytest.raises(NotImplementedError, match="uint4 has no bias, and the config no zero points"):
        kind(config, "qweight", "scales")


@pytest.mark.parametrize("kind", [StripsLinearKernel, ExllamaLinearKernel], ids=lambda kind: kind.name)
def test_act_order_is_refused_where_k_is_partitioned(kind: type[MPLinearKernel]) -> None:
    config = replace(Case(act_order=True).config, full_weight_shape=(512, 64))

    assert kind.can_implement(config) == (
        False,
        "act order needs all rows of every group, and this rank has 256 of 512",
    )
    assert MarlinLinearKernel.can_implement(config) == (True, None)
    assert choose_mp_linear_kernel(config, 90) is MarlinLinearKernel


def test_a_share_in_act_order_is_given_to_a_kernel_that_can() -> None:
    config = replace(Case(act_order=True, group=48, K=96).config, full_weight_shape=(192, 64))

    assert choose_mp_linear_kernel(config) is DequantizeLinearKernel  # Marlin has no groups of 48
    assert choose_mp_linear_kernel(replace(config, full_weight_shape=(96, 64))) is ExllamaLinearKernel


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", [MarlinLinearKernel, DequantizeLinearKernel], ids=lambda kind: kind.name)
def test_act_order_over_ranks_is_right_with_all_scales_on_every_rank(
    kind: type[MPLinearKernel], place: int
) -> None:
    whole = Case(act_order=True, K=256, group=64)
    share, part = row_share(whole, whole.weight(), place, 2), replace(whole, K=128)
    config = replace(part.config, full_weight_shape=(256, 64))
    layer = part.layer(share)
    kernel = kind(config, "qweight", "scales", None, "g_idx")

    kernel.process_weights_after_loading(layer)

    assert tuple(layer.scales.shape) == (4, 64)
    assert_reads_back(lambda x: kernel.apply_weights(layer, x), share, torch.float16)


@every_kernel
def test_leading_dimensions_bias_and_no_rows_at_all(kind: type[MPLinearKernel]) -> None:
    case = Case()
    apply, bias = prepare(kind, case, case.weight(scale=1.0)), torch.arange(64).half()
    x = (torch.arange(2 * 3 * 256) % 5 - 2).reshape(2, 3, 256).half()

    flat = apply(x.reshape(6, 256))

    assert_same_bits(apply(x), flat.reshape(2, 3, 64))
    assert torch.equal(apply(x, bias), (flat.float() + bias).half().reshape(2, 3, 64))
    assert apply(x[:0]).shape == (0, 3, 64)
    assert torch.equal(apply(x.transpose(0, 1)), apply(x).transpose(0, 1))


REFUSED = [
    pytest.param({"weight_type": scalar_types.uint5b16}, "reads unsigned codes of", id="5 bits"),
    pytest.param({"weight_type": scalar_types.int4}, "got int4", id="a signed type"),
    pytest.param({"weight_type": scalar_types.float8_e4m3fn}, "got float8_e4m3fn", id="a float"),
    pytest.param({"act_type": torch.float64}, "got float64", id="float64"),
    pytest.param({"zero_points": True}, "uint4b8 has a bias already", id="bias and zero points"),
    pytest.param({"group_size": 0}, "a group size is -1 or at least 1, got 0", id="group 0"),
    pytest.param({"full_weight_shape": (288, 64)}, None, id="a cut on a group"),
    pytest.param(
        {"full_weight_shape": (512, 64), "partition_weight_shape": (240, 64)}, "falls inside", id="in a group"
    ),
    pytest.param({"partition_weight_shape": (512, 64)}, "is none", id="more than the whole"),
    pytest.param({"full_weight_shape": (256, 60), "partition_weight_shape": (256, 60)}, "N = 60", id="N"),
    pytest.param({"out_type": torch.float32}, "writes the dtype it reads", id="another output"),
]


@every_kernel
@pytest.mark.parametrize(("change", "text"), REFUSED)
def test_a_no_says_why(kind: type[MPLinearKernel], change: dict[str, Any], text: str | None) -> None:
    able, reason = kind.can_implement(replace(Case().config, **change))

    assert able == (text is None)
    assert (text or "") in (reason or "")


def test_zero_points_without_their_convention_are_refused() -> None:
    config = replace(Case(zeros=Stored()).config, zeros=None, has_g_idx=True)

    assert "Stored() or StoredMinusOne()" in (MarlinLinearKernel.can_implement(config)[1] or "")


@pytest.mark.parametrize("kind", [scalar_types.uint4, scalar_types.uint8], ids=str)
def test_zero_points_of_the_types_that_engines_use_are_as_stored(kind: ScalarType) -> None:
    config = replace(Case(zeros=Stored()).config, weight_type=kind, zeros=None)

    assert config.zeros == Stored()
    assert replace(config, zeros=STORED_MINUS_ONE).zeros == STORED_MINUS_ONE
    assert replace(config, weight_type=scalar_types.uint4b8, zeros=None, zero_points=False).zeros is None


def test_exllama_lists_what_codes_may_mean() -> None:
    types = ExllamaLinearKernel.SUPPORTED_QUANT_TYPES

    assert types[:4] == (
        scalar_types.uint2b2,
        scalar_types.uint3b4,
        scalar_types.uint4b8,
        scalar_types.uint8b128,
    )
    unsigned = scalar_types.uint2, scalar_types.uint3, scalar_types.uint4, scalar_types.uint8
    assert types[4:] == unsigned
    for kind in types:
        config = Case(zeros=None if kind.has_bias() else Stored()).config
        assert ExllamaLinearKernel.can_implement(replace(config, weight_type=kind)) == (True, None)


def test_the_best_kernel_that_can_is_chosen() -> None:
    assert choose_mp_linear_kernel(Case().config) is MarlinLinearKernel
    assert choose_mp_linear_kernel(Case().config, 90) is StripsLinearKernel
    assert choose_mp_linear_kernel(Case().config, 80) is StripsLinearKernel
    assert choose_mp_linear_kernel(Case().config, 120) is StripsLinearKernel
    assert choose_mp_linear_kernel(Case(group=48).config) is ExllamaLinearKernel
    assert choose_mp_linear_kernel(Case(bits=3).config) is ExllamaLinearKernel
    assert choose_mp_linear_kernel(Case().config, 75) is ExllamaLinearKernel
    assert choose_mp_linear_kernel(Case().config, 50) is DequantizeLinearKernel
    bf16 = replace(Case(bits=3).config, act_type=torch.bfloat16)
    assert choose_mp_linear_kernel(bf16) is ExllamaLinearKernel
    assert choose_mp_linear_kernel(replace(bf16, act_type=torch.float32)) is DequantizeLinearKernel
    assert choose_mp_linear_kernel(Case(group=256, K=1024).config, 90) is StripsLinearKernel


@pytest.mark.usefixtures("seen_texts")
def test_where_none_can_every_reason_is_listed() -> None:
    config = replace(Case().config, act_type=torch.float64)

    with pytest.raises(NoKernelError) as caught:
        choose_mp_linear_kernel(config, 60)

    assert set(caught.value.reasons) == {kernel.__name__ for kernel in KERNELS}
    assert all(kernel.__name__ in str(caught.value) for kernel in KERNELS)


@pytest.mark.usefixtures("seen_texts")
@every_kernel
def test_a_parameter_of_another_shape_is_named(kind: type[MPLinearKernel]) -> None:
    layer = Case(group=64).layer(Case(group=64).weight())

    with pytest.raises(ShapeError, match=r"qweight: scales: wrong shape\n  expected \(8, 64\)"):
        kind(Case(group=32).config, "qweight", "scales").process_weights_after_loading(layer)


@pytest.mark.usefixtures("seen_texts")
@every_kernel
def test_weights_are_processed_once_and_before_the_first_call(kind: type[MPLinearKernel]) -> None:
    case = Case()
    layer, kernel = case.layer(case.weight()), kind(case.config, "qweight", "scales")
    with pytest.raises(ArgumentError, match="before the first call"):
        kernel.apply_weights(layer, torch.ones(1, 256).half())

    kernel.process_weights_after_loading(layer)

    with pytest.raises(ArgumentError, match="a second time"):
        kernel.process_weights_after_loading(layer)


@pytest.mark.usefixtures("seen_texts")
@every_kernel
def test_a_config_that_needs_a_parameter_has_to_name_it(kind: type[MPLinearKernel]) -> None:
    with pytest.raises(KernelRefusedError, match="zero points in the config, and no parameter"):
        kind(Case(zeros=Stored()).config, "qweight", "scales")


@pytest.mark.usefixtures("seen_texts")
def test_a_parameter_is_turned_so_that_its_tags_are_those_asked_for() -> None:
    layer = Case(turned=True).layer(Case().weight())
    before = layer.qweight.data.clone()

    permute_param_layout_(layer.qweight, input_dim=0, output_dim=1, packed_dim=0)

    assert torch.equal(layer.qweight, before.t())
    assert (layer.qweight.input_dim, layer.qweight.output_dim, layer.qweight.packed_dim) == (0, 1, 0)
    with pytest.raises(ArgumentError, match="packed along the new axis 1"):
        permute_param_layout_(layer.qweight, input_dim=0, output_dim=1, packed_dim=1)


def test_marlin_zeroes_a_workspace_that_serves_every_chip() -> None:
    case = Case(N=9600, K=128, group=-1)
    layer = case.layer(case.weight())

    MarlinLinearKernel(case.config, "qweight", "scales").process_weights_after_loading(layer)

    assert layer.workspace.numel() >= 9600 // 64 * 16
    assert not layer.workspace.any()
    assert layer.workspace.dtype == torch.int32


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("kind", [StripsLinearKernel, MarlinLinearKernel], ids=lambda kind: kind.name)
def test_weights_beyond_the_range_that_is_multiplied_in_are_refused(kind: type[MPLinearKernel]) -> None:
    """Many tokens are multiplied with weights rounded to fp16, where these are infinite."""
    case = Case(zeros=Stored())

    with pytest.raises(CastError, match="DequantizeLinearKernel"):
        prepare(kind, case, case.weight(scale=16384.0))
    prepare(kind, case, case.weight(scale=2048.0))


@pytest.mark.parametrize(
    ("attributes", "axes"),
    [({}, (0, 1)), ({"output_dim": 0}, (1, 0)), ({"output_dim": 1}, (0, 1)), ({"input_dim": 1}, (1, 0))],
)
def test_one_axis_of_a_parameter_implies_the_other(attributes: dict[str, int], axes: tuple[int, int]) -> None:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)
    for name, value in attributes.items():
        setattr(layer.weight, name, value)
    before = layer.weight.data.clone()

    permute_param_layout_(layer.weight, input_dim=0, output_dim=1)

    assert torch.equal(layer.weight, before if axes == (0, 1) else before.t())
