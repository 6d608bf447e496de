"""The type of the activations that a layer is made for: what is converted, what stays, what is refused."""

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError, CastError
from qload.experts import ExpertFacts, ExpertsWeight, GatedActivation, LocalExperts
from qload.experts.weight import stacked
from qload.formats import GPTQWeight, UnquantizedWeight
from qload.kernel_formats import repack, restore
from qload.kernels import dtypes
from qload.spec import Weight
from qload.testing import assert_same_bits, assert_within_bound
from tests.experts import drawn
from tests.kernels.mp_layers import Case

pytestmark = pytest.mark.usefixtures("seen_texts", "seen_logs")

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
UNITS = {HALF: 2.0**-11, BRAIN: 2.0**-8}
LAYOUTS = pytest.mark.parametrize("layout", ["marlin", "strips", "exllama"])
ORDERS = pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act order"])
TYPES = pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL], ids=["float16", "bfloat16", "float32"])


def stored(scales: torch.dtype = HALF, **case: Any) -> GPTQWeight:
    weight = Case(**case).weight()
    held: dict[str, Any] = {**weight.fields(), "scales": weight.scales.to(scales)}
    return GPTQWeight(config=weight.config, **held)


@LAYOUTS
@ORDERS
@pytest.mark.parametrize("scales", [HALF, BRAIN, FULL], ids=["float16", "bfloat16", "float32"])
@TYPES
def test_scales_have_the_type_of_the_activations_each_within_one_rounding(
    layout: str, act_order: bool, scales: torch.dtype, dtype: torch.dtype
) -> None:
    weight = repack(stored(scales, act_order=act_order), layout)

    module: Any = weight.get_linear(dtype=dtype)

    was, now = weight.fields(), module.typed.fields()
    wanted = scales if dtype == FULL else dtype
    assert now["scales"].dtype == wanted
    error = (now["scales"].double() - was["scales"].double()).abs()
    assert bool((error <= UNITS.get(wanted, 0.0) * was["scales"].double().abs()).all())
    assert (restore(module.typed).format, module.typed.layer.origin is None) == ("gptq", wanted != scales)
    for name in was.keys() - {"scales"}:
        assert_same_bits(now[name], was[name])
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_within_bound(module, module.typed, x)


@LAYOUTS
def test_without_a_dtype_nothing_is_converted(layout: str) -> None:
    weight, bias = repack(stored(), layout), torch.ones(64)

    module: Any = weight.get_linear(bias)

    assert module.typed.layer.origin is not None
    assert {name: id(held) for name, held in module.typed.fields().items()} == {
        name: id(held) for name, held in weight.fields().items()
    }
    assert module.bias is bias


@TYPES
def test_a_bias_and_a_plain_weight_are_cast(dtype: torch.dtype) -> None:
    weight = UnquantizedWeight(weight=torch.tensor([[1.0, 2.0 + 2**-9], [3.0, 4.0]]))

    module: Any = weight.get_linear(torch.tensor([1.0, 2.0]).half(), dtype=dtype)

    assert (module.bias.dtype, module.typed.weight.dtype) == (dtype, dtype)
    assert_same_bits(module.typed.weight, weight.weight.to(dtype))


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_a_layer_in_a_checkpoints_order_keeps_its_scales(dtype: torch.dtype) -> None:
    weight = stored(FULL)

    module: Any = weight.get_linear(dtype=dtype)

    assert module.typed.scales is weight.scales


@LAYOUTS
@ORDERS
@pytest.mark.parametrize("dtype", [None, HALF])
def test_weights_beyond_the_range_of_16_bits_are_refused(
    layout: str, act_order: bool, dtype: torch.dtype | None
) -> None:
    weight = stored(act_order=act_order)
    weight.scales[3, 5] = 60000
    packed = repack(weight, layout)

    with pytest.raises(
        CastError, match=r"overflows\n  got .*\n  remedy   get_linear\(dtype=torch.bfloat16\)"
    ):
        packed.get_linear(dtype=dtype)
    for wide in (BRAIN, FULL):
        assert packed.get_linear(dtype=wide)(torch.ones(1, 256).to(wide)).isfinite().all()


@pytest.mark.parametrize("scale", [60000, -60000])
def test_a_scale_of_either_sign_may_be_beyond_the_range(scale: float) -> None:
    weight = stored()
    weight.scales[3, 5] = scale

    with pytest.raises(CastError, match="overflows"):
        repack(weight, "marlin").get_linear()


def test_the_range_of_codes_of_8_bits_is_taken_into_account() -> None:
    weight = stored(bits=8)
    weight.scales[3, 5] = 900  # of codes of 6 bits all values were finite

    with pytest.raises(CastError, match="overflows"):
        repack(weight, "marlin").get_linear()


@LAYOUTS
def test_a_large_scale_of_codes_that_stay_in_range_is_taken(layout: str) -> None:
    weight = stored()
    weight.qweight.fill_(-0x77777778)  # every code is 8, which means 0
    weight.scales.fill_(60000)

    assert repack(weight, layout).get_linear()(torch.ones(2, 256).half()).tolist() == [[0.0] * 64] * 2


@LAYOUTS
@pytest.mark.parametrize(
    ("value", "way"),
    [
        pytest.param(1e-6, "underflows", id="a scale that loses bits"),
        pytest.param(1e6, "overflows", id="a scale that fp16 does not hold"),
    ],
)
def test_a_scale_that_float16_does_not_hold_is_refused(layout: str, value: float, way: str) -> None:
    weight = stored(BRAIN)
    weight.scales[1, 2] = value
    packed = repack(weight, layout)

    with pytest.raises(
        CastError, match=rf"scales: a cast from bfloat16 to float16 {way}\n.*\n  remedy   get_l"
    ):
        packed.get_linear(dtype=HALF)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn], ids=str)
def test_other_types_of_activations_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(
        ArgumentError, match=r"dtype\n  expected None, torch.float16, torch.bfloat16 or torch.float32"
    ):
        stored().get_linear(dtype=dtype)


class OnDevice(Tensor):
    """What says that it is on a GPU."""

    is_cuda = True


def on_device(dtype: torch.dtype) -> Tensor:
    return torch.zeros(1, 256, dtype=dtype).as_subclass(OnDevice)


@LAYOUTS
@pytest.mark.parametrize(
    ("scales", "x", "told"),
    [
        (HALF, HALF, None),
        (BRAIN, BRAIN, None),
        (HALF, BRAIN, "no kernel multiplies activations of bfloat16 by scales of float16, get_linear(dtype="),
        (BRAIN, HALF, "get_linear(dtype=torch.float16) has one"),
        (HALF, FULL, "no kernel multiplies activations of float32: they take a slower way"),
        (FULL, FULL, "no kernel multiplies activations of float32: they take a slower way"),
    ],
)
def test_a_module_without_a_kernel_for_its_activations_says_so_once(
    layout: str, scales: torch.dtype, x: torch.dtype, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    notice, weight = dtypes.Notice(), repack(stored(scales), layout)

    with caplog.at_level(logging.WARNING, logger="qload"):
        for _ in range(3):
            notice.of(weight, on_device(x))
        twice = copy.copy(notice)
        twice.of(weight, on_device(x))

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (told is not None)
    assert all(told in each for each in said if told)


@LAYOUTS
def test_a_module_tells_of_itself_once(layout: str, caplog: pytest.LogCaptureFixture) -> None:
    module = repack(stored(), layout).get_linear()

    for dtype in (HALF, BRAIN, FULL, BRAIN):
        module(on_device(dtype))

    assert [record.levelname for record in caplog.records if record.name == "qload"] == ["WARNING"]


def test_a_bias_of_another_type_is_told(caplog: pytest.LogCaptureFixture) -> None:
    notice, weight = dtypes.Notice(), repack(stored(), "strips")

    notice.of(weight, on_device(HALF), torch.ones(64).half())
    assert not caplog.records
    notice.of(weight, on_device(HALF), torch.ones(64))

    assert "activations of float16 by a bias of float32, get_linear" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    "weight", [stored(), UnquantizedWeight(weight=torch.ones(4, 256))], ids=["gptq", "plain"]
)
def test_layers_that_no_kernel_would_take_say_nothing(
    weight: Weight, caplog: pytest.LogCaptureFixture
) -> None:
    dtypes.Notice().of(weight, on_device(BRAIN))
    dtypes.Notice().of(
        repack(stored(), "strips"), torch.zeros(1, 256, dtype=BRAIN)
    )  # on the CPU there is none

    assert not caplog.records


def test_weights_without_values_are_not_looked_at() -> None:
    weight = repack(stored(), "strips")
    away = weight.holding({name: held.to("meta") for name, held in weight.fields().items()})

    module: Any = away.get_linear(dtype=BRAIN)

    assert module.typed.scales.dtype == BRAIN


@LAYOUTS
@TYPES
def test_experts_get_scales_and_biases_of_the_type_of_the_activations(
    layout: str, dtype: torch.dtype
) -> None:
    whole = experts_of_gptq()
    repacked = whole.repack(layout)

    module: Any = repacked.get_linear(dtype=dtype)

    typed = module.typed
    wanted = HALF if dtype == FULL else dtype
    for was, now in ((repacked.gate_up, typed.gate_up), (repacked.down, typed.down)):
        error = (now.tensors["scales"].double() - was.tensors["scales"].double()).abs()
        assert now.tensors["scales"].dtype == wanted
        assert bool((error <= UNITS.get(wanted, 0.0) * was.tensors["scales"].double().abs()).all())
        for name in was.tensors.keys() - {"scales"}:
            assert_same_bits(now.tensors[name], was.tensors[name])
    assert typed.gate_up_bias.dtype == typed.down_bias.dtype == dtype
    unchanged: Any = repacked.get_linear()
    assert unchanged.typed.gate_up.tensors["scales"] is repacked.gate_up.tensors["scales"]


@LAYOUTS
def test_experts_whose_scales_a_type_cannot_hold_are_refused_by_name(layout: str) -> None:
    repacked = experts_of_gptq(1e38, torch.bfloat16).repack(layout)

    with pytest.raises(CastError, match=r"experts\.0\.gate_up_proj\.scales"):
        repacked.get_linear(dtype=HALF)


def experts_of_gptq(scale: float = 1.0, scales: torch.dtype = HALF) -> ExpertsWeight:
    """Two experts (64 to 64 to 64) of 4 bits, with biases."""
    chance = torch.Generator().manual_seed(7)
    stacks = []
    for make in (drawn.gate_up, drawn.down):
        layers = make(drawn.gptq, 2, 64, 64, chance)
        held = [replace(each, scales=(each.scales.float() * scale).to(scales)) for each in layers]
        stacks.append(stacked("experts", 2, held))
    facts = ExpertFacts(GatedActivation("silu"))
    biases = torch.ones(2, 128), torch.ones(2, 64)
    return ExpertsWeight(*stacks, facts, LocalExperts(0, 2, 2), *biases)
