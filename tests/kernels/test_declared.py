"""Declared schemes of inputs: on every typed weight, in every product, over parts, shares and repacks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.checkpoint import layers
from qload.errors import ArgumentError, MismatchError, RepackError
from qload.formats import Fp8Config, Fp8Weight, UnquantizedWeight
from qload.kernel_formats import repack, restore
from qload.kernel_formats.fp8_marlin import Fp8MarlinWeight
from qload.kernels import Linear, cuda, declared, plans
from qload.kernels.activations import quantize
from qload.kernels.declared import why_no_quantizer
from qload.parallel import FakeWorld, maximum_over
from qload.spec import ActivationScheme, Layer, Weight
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.kernels.activation_cases import PREFIX, Case, distance, named

pytestmark = pytest.mark.usefixtures("seen_texts")

TOKENS = ["w8a8_int8_token_dynamic_sym", "w8a8_int8_token_dynamic_asym", "fp8_token_dynamic"]
TENSORS = ["w8a8_int8_tensor_dynamic_sym", "w8a8_int8_tensor_dynamic_asym", "fp8_tensor_dynamic"]
GROUPS = ["w8a8_int8_group_dynamic_sym", "w8a8_int8_group_dynamic_asym", "mxfp8_dynamic", "mxfp4_dynamic"]
STATIC = ["w8a8_int8_tensor_static_asym", "fp8_tensor_static", "nvfp4_local_dynamic"]
PAIRS = ["fp8_tensor_static_part", "w8a8_int8_tensor_static_asym_part"]


def rows(case: Case, group: Any) -> Weight:
    storage = MemoryStorage(case.tensors)
    return Weights(storage, loader=case.loader, process_group=group).get_weights_row(PREFIX)


def fused(name: str, **options: Any) -> tuple[list[Case], Weight]:
    cases = [named(f"{name}{part}") for part in (0, 1)]
    tensors = {
        key.replace(PREFIX, prefix): tensor
        for prefix, case in zip("ab", cases, strict=True)
        for key, tensor in case.tensors.items()
    }
    weights = Weights(MemoryStorage(tensors), loader=cases[0].loader, **options)
    return cases, weights.get_multi_weights_col(["a", "b"])


def share_of_x(case: Case, weight: Weight, rank: int) -> Tensor:
    return case.x.narrow(-1, rank * weight.layer.K, weight.layer.K)


@pytest.mark.parametrize("name", ["w8a8_int8_token_dynamic_sym", "modelopt_nvfp4_local_dynamic"])
def test_a_scheme_goes_wherever_its_weight_goes(name: str) -> None:
    case, weight = named(name), named(name).weight
    (info,) = layers(case.weights)
    moved, twin = weight.to("cpu"), weight.holding(dict(weight.fields()))

    assert weight.activations == case.loader.formats[0].activations
    module: Any = weight.get_linear()
    assert {moved.activations, twin.activations, module.typed.activations} == {case.scheme}
    assert info.activations is not None
    assert str(info.activations) == str(case.scheme) in repr(weight.get_linear())


def test_repacked_and_restored_weights_declare_what_they_did() -> None:
    case = named("w4a8_int8_token_dynamic_sym")

    for layout in ("marlin", "exllama", "gptq", "strips", "panels"):
        made = repack(case.weight, layout)
        assert made.activations == restore(made).activations == case.scheme
        with native.reference():  # the kernel of a CPU reads some of these orders, and adds in another one
            assert torch.equal(made.get_linear()(case.x), case.weight.get_linear()(case.x))


def test_a_repack_that_would_lose_a_stored_scale_is_refused() -> None:
    with pytest.raises(RepackError, match="stored scale of its inputs"):
        repack(named("w4a8_int8_tensor_static_asym").weight, "marlin")


def test_fp8_in_marlins_order_keeps_the_scale_that_its_scheme_names() -> None:
    case = named("fp8_tensor_static")
    made = repack(case.weight, "marlin", dtype=torch.bfloat16, exponent_bias=False)
    dequantized = case.owner["expected.x_dequant"]

    y = made.get_linear(case.bias)(case.x)

    assert bool((distance(y, dequantized, made.dequantize(), case.bias) <= 1).all())
    assert isinstance(made, Fp8MarlinWeight)
    lost = replace(made, input_scale=None)
    with pytest.raises(ArgumentError, match="fp8_marlin has no input_scale"):
        lost.get_linear()


@pytest.mark.parametrize("name", [TOKENS[0], *STATIC])
def test_unquantized_takes_inputs_as_they_come(name: str) -> None:
    case, weight = named(name), named(name).weight

    y = weight.get_linear(case.bias, activations="unquantized")(case.x)

    assert bool((distance(y, case.x, weight.dequantize(), case.bias) <= 1).all())
    assert not torch.equal(y, weight.get_linear(case.bias)(case.x))
    plain = plans.multiply(case.x, weight, case.bias, "unquantized")
    assert_same_bits(plain, y)


@pytest.mark.parametrize("name", [TOKENS[0], STATIC[1]])
def test_no_native_kernel_is_asked_where_inputs_are_quantized(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that are taken to lie on CUDA, and a kernel that would take everything."""
    case, way_of = named(name), plans.way_of
    x = case.x
    monkeypatch.setitem(plans.OPERATORS, type(case.weight), None)
    monkeypatch.setattr(plans, "way_of", lambda kind, scheme, device: way_of(kind, scheme, "cuda"))
    monkeypatch.setattr(cuda, "can_multiply", lambda *_: True)
    monkeypatch.setattr(cuda, "linear", lambda x, weight, bias=None: "native")

    assert plans.multiply(x, case.weight, activations="unquantized") == "native"
    with native.reference():
        assert torch.equal(torch.Tensor(plans.multiply(x, case.weight)), case.weight.get_linear()(case.x))


@pytest.mark.parametrize("name", [*TOKENS, *TENSORS])
@pytest.mark.parametrize("world", [2, 4])
def test_shares_along_k_find_the_scale_of_all_inputs(name: str, world: int) -> None:
    """Each rank multiplies its part of the very x that the whole layer multiplies."""
    case = named(name)
    whole = case.owner["expected.x_dequant"]

    def work(group: Any) -> Tensor:
        weight = rows(case, group)
        x = share_of_x(case, weight, group.rank())
        maximum = maximum_over(group)
        made = quantize(x, case.scheme, maximum=maximum)
        assert torch.equal(made.dequantize(), share_of_whole(whole, weight, group.rank()))
        y: Tensor = weight.get_linear(maximum=maximum)(x)
        return y

    y = torch.stack(FakeWorld(world).run(work)).sum(0)

    assert bool((distance(y, whole, case.weight.dequantize(), torch.zeros(())) <= 1).all())


def share_of_whole(whole: Tensor, weight: Weight, rank: int) -> Tensor:
    return whole.narrow(-1, rank * weight.layer.K, weight.layer.K)


@pytest.mark.parametrize("name", [*GROUPS, *STATIC])
def test_shares_of_groups_and_stored_scales_need_no_other_rank(name: str) -> None:
    case, total = named(name), torch.zeros(())
    for group in FakeWorld(4):
        weight = rows(case, group)
        total = total + weight.get_linear()(share_of_x(case, weight, group.rank()))

    whole = case.owner["expected.x_dequant"]
    assert bool((distance(total, whole, case.weight.dequantize(), torch.zeros(())) <= 1).all())


@pytest.mark.parametrize("name", [TOKENS[0], TENSORS[1]])
def test_a_share_that_lacks_the_others_is_refused_unless_its_own_maximum_is_asked_for(name: str) -> None:
    case = named(name)
    weight = rows(case, list(FakeWorld(2))[1])
    x = share_of_x(case, weight, 1)

    for call in (weight.get_linear, lambda: plans.multiply(x, weight), lambda: Linear(weight)):
        with pytest.raises(ArgumentError, match=r"maximum_over\(process_group\), as a scale covers all 128"):
            call()
    own = weight.get_linear(maximum="own")(x)

    taken = quantize(x, case.scheme).dequantize()
    assert bool((distance(own, taken, weight.dequantize(), torch.zeros(())) <= 1).all())
    assert not torch.equal(taken, share_of_whole(case.owner["expected.x_dequant"], weight, 1))
    assert weight.get_linear(activations="unquantized")(x).shape == own.shape


def test_shares_along_n_see_all_inputs() -> None:
    case, weight = named(TOKENS[0]), named(TOKENS[0]).weight
    loads = (
        Weights(MemoryStorage(case.tensors), loader=case.loader, process_group=group).get_weights_col(PREFIX)
        for group in FakeWorld(2)
    )

    y = torch.cat([share.get_linear()(case.x) for share in loads], -1)

    assert bool(
        (distance(y, case.owner["expected.x_dequant"], weight.dequantize(), torch.zeros(())) <= 1).all()
    )


@pytest.mark.parametrize("name", PAIRS)
def test_fused_parts_quantize_inputs_each_by_its_own_scale(name: str) -> None:
    cases, weight = fused(name)
    N = cases[0].weight.layer.N
    assert weight.activations == cases[0].scheme
    assert weight.fields()["input_scale"].shape == (2,)

    y = weight.get_linear(torch.cat([case.bias for case in cases]))(cases[0].x)

    for part, case in enumerate(cases):
        mine, want = y[..., part * N : (part + 1) * N], case.owner["expected.x_dequant"]
        assert bool((distance(mine, want, case.weight.dequantize(), case.bias) <= 1).all())
    assert not torch.equal(cases[0].owner["expected.x_dequant"], cases[1].owner["expected.x_dequant"])


@pytest.mark.parametrize("name", PAIRS)
def test_shares_of_fused_parts_keep_all_scales(name: str) -> None:
    cases, whole = fused(name)
    for group in FakeWorld(2):
        _, weight = fused(name, process_group=group)
        assert_same_bits(weight.fields()["input_scale"], whole.fields()["input_scale"])
        y = weight.get_linear()(cases[0].x)
        for part, case in enumerate(cases):
            half = case.weight.layer.N // 2
            w = case.weight.dequantize()[group.rank() * half :][:half]
            mine = y[..., part * half : (part + 1) * half]
            assert bool((distance(mine, case.owner["expected.x_dequant"], w, torch.zeros(())) <= 1).all())


def apart(one: Case, other: Case, inputs: dict[str, Any] | None) -> Weights:
    """Layers a and b of one format, whose inputs two groups of a config quantize apart."""
    tensors = {
        key.replace(PREFIX, prefix): tensor
        for prefix, case in (("a", one), ("b", other))
        for key, tensor in case.tensors.items()
    }
    (group,) = one.config["config_groups"].values()
    second = {**group, "targets": ["re:^b$"], "input_activations": inputs}
    config = {**one.config, "config_groups": {"a": {**group, "targets": ["re:^a$"]}, "b": second}}
    return Weights(MemoryStorage(tensors), loader=Case({}, config, {}).loader)


def test_parts_whose_inputs_are_quantized_apart_are_not_fused() -> None:
    one, other = named("w8a8_int8_token_dynamic_sym"), named("w8a8_int8_token_dynamic_asym")
    (group,) = other.config["config_groups"].values()
    weights = apart(one, other, group["input_activations"])

    with pytest.raises(MismatchError, match="quantize inputs apart") as caught:
        weights.get_multi_weights_col(["a", "b"])

    assert "int8 token dynamic asymmetric" in str(caught.value)
    assert weights.get_weights("b").activations == other.scheme


@pytest.mark.parametrize("name", [TOKENS[2], GROUPS[0]])
def test_a_part_that_declares_nothing_is_not_fused_with_one_that_does(name: str) -> None:
    case = named(name)
    weights = apart(case, case, None)

    with pytest.raises(MismatchError, match="quantize inputs apart"):
        weights.get_multi_weights_col(["a", "b"])

    assert weights.get_weights("a").activations == case.scheme
    assert weights.get_weights("b").activations is None


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (ActivationScheme("int", 16, True, "token"), "nothing here makes codes of int16"),
        (ActivationScheme("float", 6, True, "token"), "nothing here makes codes of float6"),
        (ActivationScheme("float", 8, True, "token", symmetric=False), "floats have no zero point"),
        (ActivationScheme("float", 8, True), "does not say which inputs share a scale"),
        (ActivationScheme("float", 8, False, "group", 128, scale="s"), "no stored scale is one a group"),
        (ActivationScheme("float", 8, True, "block", 128), "nothing here finds scales of a block"),
        (ActivationScheme("int", 8, True, "token", scale_type="e8m0"), "are not rounded to e8m0"),
        (ActivationScheme("int", 8, False, "tensor"), "no scale is stored"),
        (ActivationScheme("float", 4, "local", "tensor_group", 16), "no scale is stored"),
        (ActivationScheme("int", 8, True, "group", 3), "K = 8 does not divide into groups of 3"),
    ],
    ids=str,
)
def test_what_nobody_quantizes_is_refused_in_words(scheme: ActivationScheme, reason: str) -> None:
    weight = UnquantizedWeight(weight=torch.ones(4, 8), layer=Layer((4,), 8, (4, 8), "up", None, scheme))

    assert reason in (declared.why_not(weight) or "")
    with pytest.raises(ArgumentError, match="up: activations") as caught:
        weight.get_linear()
    assert reason in str(caught.value)
    assert weight.get_linear(activations="unquantized")(torch.ones(8)).tolist() == [8] * 4


def test_every_scheme_with_a_fixture_has_a_quantizer() -> None:
    assert why_no_quantizer(named("fp8_token_dynamic").scheme) is None


def test_codes_of_another_float8_are_not_made() -> None:
    codes = torch.ones(2, 4).to(torch.float8_e4m3fnuz)
    scheme = ActivationScheme("float", 8, True, "token")
    layer = Layer((2,), 4, (2, 4), "up", None, scheme)
    weight = Fp8Weight(config=Fp8Config(), weight=codes, weight_scale=torch.ones(1), layer=layer)

    assert declared.why_not(weight) == "nothing here makes codes of float8_e4m3fnuz"


def test_an_asymmetric_static_scheme_needs_its_zero_point() -> None:
    case = named("w8a8_int8_tensor_static_asym")
    tensors = {name: tensor for name, tensor in case.tensors.items() if "zero_point" not in name}
    weight = replace(case, tensors=tensors).weight

    with pytest.raises(ArgumentError, match="no zero point is stored"):
        weight.get_linear()


@pytest.mark.parametrize("name", ["nvfp4_local_dynamic", "modelopt_nvfp4_local_dynamic"])
def test_fp4_in_marlins_order_names_the_scale_of_its_inputs_as_that_order_does(name: str) -> None:
    case = named(name)
    made = repack(case.weight, "marlin", dtype=torch.bfloat16)
    back = restore(made)

    taken = case.owner["expected.x_dequant"]
    y = made.get_linear(case.bias)(case.x)
    assert bool((distance(y, taken, made.dequantize(), case.bias) <= 1).all())
    assert back.activations == case.scheme
    assert torch.equal(back.get_linear()(case.x), case.weight.get_linear()(case.x))
