"""What a mixed-precision kernel says no to before it is made, and refuses when it sees the tensors."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from qload.errors import (
    AmbiguousIndexError,
    ArgumentError,
    CastError,
    DtypeError,
    KernelRefusedError,
    NoKernelError,
    ShapeError,
)
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
from qload.layouts import StoredMinusOneUnmasked
from qload.testing import assert_reads_back, assert_within_bound
from tests.kernels.mp_layers import Case, row_share

every_kernel = pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.name)

MALFORMED = [
    pytest.param({"full_weight_shape": (64,)}, "full_weight_shape has to be (K, N)", id="a shape of one"),
    pytest.param({"partition_weight_shape": None}, "partition_weight_shape has to", id="no shape"),
    pytest.param({"full_weight_shape": (64.0, 64)}, "full_weight_shape has to", id="a fraction"),
    pytest.param({"weight_type": None}, "weight_type has to be a ScalarType", id="no type"),
    pytest.param({"weight_type": "uint4b8"}, "weight_type has to be a ScalarType", id="a type's name"),
    pytest.param({"act_type": "float16"}, "act_type has to be a torch.dtype", id="a dtype's name"),
    pytest.param({"out_type": "float16"}, "out_type has to be a torch.dtype or None", id="an output's name"),
    pytest.param({"scale_type": "half"}, "scale_type has to be a torch.dtype or None", id="a scale's name"),
    pytest.param({"group_size": "32"}, "group_size has to be a whole number, got '32'", id="a text"),
    pytest.param({"group_size": 32.0}, "group_size has to be a whole number, got 32.0", id="a float"),
    pytest.param({"group_size": None}, "group_size has to be a whole number", id="no group size"),
    pytest.param({"group_size": True}, "group_size has to be a whole number, got True", id="a truth"),
    pytest.param({"zero_points": None}, "zero_points has to be true or false", id="no zero points"),
    pytest.param({"has_g_idx": 1}, "has_g_idx has to be true or false", id="an index"),
    pytest.param({"zeros": "stored"}, "zeros has to be Stored()", id="a convention's name"),
    pytest.param({"order": "foo"}, "order has to be 'gptq' or 'awq', got 'foo'", id="an order"),
    pytest.param({"order": None}, "order has to be 'gptq' or 'awq', got None", id="no order"),
    pytest.param(
        {"weight_type": ScalarType(0, 4, False, 16)}, "0 <= bias < 16, got 16", id="a bias that is no code"
    ),
    pytest.param({"weight_type": ScalarType(0, 4, False, -3)}, "0 <= bias < 16, got -3", id="a bias below 0"),
]


@every_kernel
@pytest.mark.parametrize(("change", "text"), MALFORMED)
def test_a_malformed_config_is_answered_with_a_no(
    kind: type[MPLinearKernel], change: dict[str, Any], text: str
) -> None:
    config = replace(Case().config, **change)

    able, reason = kind.can_implement(config)

    assert (able, text in str(reason)) == (False, True), reason
    with pytest.raises(KernelRefusedError):
        kind(config, "qweight", "scales")
    with pytest.raises(NoKernelError, match="no kernel"):
        choose_mp_linear_kernel(config)


@pytest.mark.parametrize("axes", [(0, 0, None), (0, 2, None), (1, 1, 0), (0, 1, 2), (0, 1, "1")], ids=str)
def test_a_matrix_has_two_axes(axes: tuple[Any, ...]) -> None:
    layer = Case().layer(Case().weight())

    with pytest.raises(ArgumentError, match="input_dim, output_dim, packed_dim\n  expected the axes 0 and 1"):
        permute_param_layout_(layer.qweight, axes[0], axes[1], packed_dim=axes[2])


@every_kernel
@pytest.mark.parametrize("config", [None, 5, {}])
def test_what_is_no_config_at_all_is_answered_with_a_no(kind: type[MPLinearKernel], config: Any) -> None:
    assert kind.can_implement(config) == (
        False,
        f"the config has to be an MPLinearLayerConfig, got {config!r}",
    )


@pytest.mark.parametrize("capability", ["90", 9.0, True])
def test_a_compute_capability_is_a_whole_number(capability: Any) -> None:
    with pytest.raises(ArgumentError, match="compute_capability\n  expected a whole number"):
        choose_mp_linear_kernel(Case().config, capability)


@pytest.mark.parametrize("kind", [ExllamaLinearKernel, DequantizeLinearKernel], ids=lambda kind: kind.name)
@pytest.mark.parametrize("bits", [2, 3])
def test_awqs_order_is_none_of_2_and_3_bits(kind: type[MPLinearKernel], bits: int) -> None:
    config = replace(Case(bits=bits).config, order="awq")

    assert kind.can_implement(config) == (False, f"AWQ's order is one of 4 or 8 bits, got {bits}")


@pytest.mark.parametrize("bits", [4, 8])
def test_marlin_refuses_a_convention_that_can_say_a_zero_point_beyond_its_bits(bits: int) -> None:
    config = Case(bits=bits, zeros=StoredMinusOneUnmasked()).config

    able, reason = MarlinLinearKernel.can_implement(config)

    assert not able
    assert f"a zero point of {2**bits}, which `zeros` can say, does not fit {bits} bits" == reason
    assert choose_mp_linear_kernel(config) is ExllamaLinearKernel


@every_kernel
@pytest.mark.parametrize("group", [256, 512, 1000])
def test_one_group_for_all_inputs_is_held_by_every_rank_of_a_cut(
    kind: type[MPLinearKernel], group: int
) -> None:
    whole = Case(K=256, group=-1)
    config = replace(replace(whole, K=64).config, full_weight_shape=(256, 64), group_size=group)
    share = row_share(whole, whole.weight(), 3, 4)
    layer, kernel = replace(whole, K=64).layer(share), kind(config, "qweight", "scales")

    kernel.process_weights_after_loading(layer)

    assert config.groups == layer.scales.shape[0] == 1
    assert torch.equal(kernel.typed(layer).dequantize(), share.dequantize())  # type: ignore[attr-defined]


@every_kernel
def test_a_group_as_large_as_a_share_is_none_for_all_inputs(kind: type[MPLinearKernel]) -> None:
    config = replace(Case(K=64, group=128).config, full_weight_shape=(256, 64))

    assert "falls inside groups of 128" in str(kind.can_implement(config)[1])


@pytest.mark.parametrize("kind", [MarlinLinearKernel, DequantizeLinearKernel], ids=lambda kind: kind.name)
def test_a_share_in_act_order_needs_its_index(kind: type[MPLinearKernel]) -> None:
    """An empty index would mean rows in order, and nothing tells from which group on."""
    case = Case(K=128, group=64, act_order=True)
    config, layer = replace(case.config, full_weight_shape=(256, 64)), case.layer(case.weight())
    layer.scales = torch.nn.Parameter(layer.scales.repeat(2, 1), requires_grad=False)
    layer.g_idx = torch.nn.Parameter(layer.g_idx[:0], requires_grad=False)

    with pytest.raises(
        ShapeError, match=r"g_idx: wrong shape\n  expected \(128,\) = \(K,\)\n  got      \(0,\)"
    ):
        kind(config, "qweight", "scales", None, "g_idx").process_weights_after_loading(layer)


@every_kernel
def test_an_empty_index_of_a_whole_layer_means_rows_in_order(kind: type[MPLinearKernel]) -> None:
    plain = Case()
    layer = plain.layer(plain.weight())
    layer.g_idx = torch.nn.Parameter(torch.empty(0, dtype=torch.int32), requires_grad=False)
    kernel = kind(replace(plain.config, has_g_idx=True), "qweight", "scales", None, "g_idx")

    kernel.process_weights_after_loading(layer)

    assert torch.equal(kernel.typed(layer).dequantize(), plain.weight().dequantize())  # type: ignore[attr-defined]


@every_kernel
def test_an_index_of_zeros_over_several_groups_is_refused(kind: type[MPLinearKernel]) -> None:
    case = Case(act_order=True)
    layer = case.layer(case.weight())
    layer.g_idx.data.zero_()

    with pytest.raises(AmbiguousIndexError, match="qweight: g_idx: all zero, with two readings"):
        kind(case.config, "qweight", "scales", None, "g_idx").process_weights_after_loading(layer)


@every_kernel
@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_scales_are_of_the_inputs_dtype_where_a_config_says_no_other(
    kind: type[MPLinearKernel], act: torch.dtype, dtype: torch.dtype
) -> None:
    config = replace(Case().config, act_type=act)
    layer = Case().layer(Case().weight())
    layer.scales = torch.nn.Parameter(layer.scales.to(dtype), requires_grad=False)
    able, _ = kind.can_implement(config)
    assert kind.can_implement(replace(config, scale_type=act))[0] is able
    if not able:
        return
    kernel = kind(config, "qweight", "scales")

    if dtype == act:
        kernel.process_weights_after_loading(layer)
        warm_up(layer, 1)
        assert kernel.apply_weights(layer, torch.ones(1, 256, dtype=act)).dtype == act
    else:
        stated, got = (str(each).removeprefix("torch.") for each in (act, dtype))
        text = f"qweight: scales: wrong dtype\n  expected {stated}\n  got      {got}\n  remedy   .*is {got}$"
        with pytest.raises(DtypeError, match=text):
            kernel.process_weights_after_loading(layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_dtype_of_scales_decides_between_kernels(dtype: torch.dtype) -> None:
    config = replace(Case(bits=3).config, scale_type=dtype)

    assert choose_mp_linear_kernel(replace(config, scale_type=torch.float16)) is ExllamaLinearKernel
    assert choose_mp_linear_kernel(config) is DequantizeLinearKernel
    assert ExllamaLinearKernel.can_implement(config)[1] == (
        f"multiplies by scales of float16, got {dtype}".replace("torch.", "")
    )
    brain = replace(config, act_type=torch.bfloat16)
    assert choose_mp_linear_kernel(replace(brain, scale_type=torch.float16)) is ExllamaLinearKernel
    assert choose_mp_linear_kernel(replace(brain, scale_type=torch.bfloat16)) is ExllamaLinearKernel
    assert ExllamaLinearKernel.can_implement(replace(brain, scale_type=torch.float32))[1] == (
        "multiplies by scales of float16 or bfloat16, got float32"
    )


@pytest.mark.parametrize(
    "kind", [MarlinLinearKernel, StripsLinearKernel, ExllamaLinearKernel], ids=lambda kind: kind.name
)
@pytest.mark.parametrize(
    ("act", "scale"), [(torch.bfloat16, torch.float16), (torch.float16, torch.float16)], ids=str
)
def test_kernels_multiply_by_scales_of_the_type_of_the_inputs(
    kind: type[MPLinearKernel], act: torch.dtype, scale: torch.dtype
) -> None:
    case = Case()
    layer = case.layer(case.weight())
    kernel: Any = kind(replace(case.config, act_type=act, scale_type=scale), "qweight", "scales")

    kernel.process_weights_after_loading(layer)
    warm_up(layer, 3)

    assert kernel.typed(layer).scales.dtype == layer.scales.dtype == act
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(act)
    assert_within_bound(lambda x: kernel.apply_weights(layer, x), kernel.typed(layer), x)


@pytest.mark.parametrize("kind", [MarlinLinearKernel, StripsLinearKernel], ids=lambda kind: kind.name)
def test_scales_that_the_type_of_the_inputs_does_not_hold_are_refused(kind: type[MPLinearKernel]) -> None:
    case = Case()
    layer = case.layer(case.weight())
    layer.scales = torch.nn.Parameter(layer.scales.float() * 1e-6, requires_grad=False)
    kernel = kind(replace(case.config, scale_type=torch.float32), "qweight", "scales")

    with pytest.raises(
        CastError, match=r"scales: a cast from float32 to float16 underflows\n.*\n  remedy   another"
    ):
        kernel.process_weights_after_loading(layer)


@every_kernel
def test_scales_of_another_dtype_than_the_config_says_are_refused(kind: type[MPLinearKernel]) -> None:
    layer, config = Case().layer(Case().weight()), replace(Case().config, scale_type=torch.float16)
    layer.scales = torch.nn.Parameter(layer.scales.bfloat16(), requires_grad=False)

    with pytest.raises(DtypeError, match=r"qweight: scales: .*\n  expected float16\n  got      bfloat16"):
        kind(config, "qweight", "scales").process_weights_after_loading(layer)


def test_exllama_refuses_weights_beyond_fp16() -> None:
    layer = Case().layer(Case().weight())
    layer.scales.data[3, 5] = 60000

    with pytest.raises(
        CastError, match=r"qweight: a cast from float32 to float16 overflows\n.*\n  remedy   anot"
    ):
        ExllamaLinearKernel(Case().config, "qweight", "scales").process_weights_after_loading(layer)


def test_exllama_holds_the_smallest_scales_of_fp16_exactly() -> None:
    case = Case()
    weight = case.weight()
    weight.scales.fill_(2.0**-24)
    layer, kernel = case.layer(weight), ExllamaLinearKernel(case.config, "qweight", "scales")

    kernel.process_weights_after_loading(layer)

    assert_reads_back(lambda x: x @ kernel.typed(layer).dequantize().half().T, weight, torch.float16)


@every_kernel
def test_a_bias_that_is_not_in_the_middle_is_the_zero_point(kind: type[MPLinearKernel]) -> None:
    case = Case()
    config = replace(case.config, weight_type=replace(scalar_types.uint4b8, bias=3))
    layer = case.layer(case.weight())
    kernel = kind(config, "qweight", "scales")

    kernel.process_weights_after_loading(layer)

    codes = kernel.typed(layer).codes()  # type: ignore[attr-defined]
    assert codes.zeros.unique().tolist() == [3]
    assert torch.equal(codes.plain(), case.weight().codes().plain())
