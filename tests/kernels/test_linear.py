"""`get_linear` of every format, by read-back, exact sums and a derived bound."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload import native
from qload.errors import ArgumentError, DtypeError, QloadError, ShapeError
from qload.formats import (
    FORMATS,
    Exl3Weight,
    GPTQConfig,
    GPTQWeight,
    MXFP4Config,
    MXFP4ExpertsWeight,
    UnquantizedWeight,
)
from qload.kernel_formats import repack
from qload.kernels import plans
from qload.layouts import Stored
from qload.spec import Weight
from qload.testing import (
    assert_reads_back,
    assert_same_bits,
    assert_sums_exactly,
    assert_within_bound,
    layers,
)
from tests.example_counts import at_most
from tests.format_cases import CONFIGS
from tests.kernels.mp_layers import Case

# A stack of experts is no matrix: each of them is one, in a format that is in the table.
MATRICES = [weight_type for weight_type in FORMATS if weight_type is not MXFP4ExpertsWeight]
every_matrix = pytest.mark.parametrize("weight_type", MATRICES, ids=lambda weight_type: weight_type.format)

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@every_matrix
@every_dtype
@given(data=st.data())
@at_most(10)
def test_one_hot_inputs_read_the_weight_back(
    weight_type: type[Weight], dtype: torch.dtype, data: Any
) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], most=2)).weight()

    assert_reads_back(weight.get_linear(), weight, dtype)


@every_matrix
@every_dtype
@given(data=st.data())
@at_most(10)
def test_small_integers_sum_exactly(weight_type: type[Weight], dtype: torch.dtype, data: Any) -> None:
    if weight_type is Exl3Weight:
        pytest.skip("each of its weights is a sum of 16,384 values, with too many bits for exact sums")
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], most=2, fillings=("count",))).weight()

    wide = weight.dequantize()
    # The CPU module does not round a weight, as nf4 has to be for exact sums.
    how = nullcontext if torch.equal(wide.to(dtype).float(), wide) else native.reference

    with how():
        assert_sums_exactly(weight.get_linear(), weight, dtype)


@every_matrix
@every_dtype
@given(data=st.data(), M=st.sampled_from([1, 3]))
@at_most(10)
def test_any_input_stays_within_what_rounding_can_cost(
    weight_type: type[Weight], dtype: torch.dtype, data: Any, M: int
) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], most=2)).weight()
    x = torch.randn(M, weight.layer.K, generator=torch.Generator().manual_seed(M)).to(dtype)

    assert_within_bound(weight.get_linear(), weight, x)


@given(data=st.data())
@at_most(10)
def test_an_expert_of_a_stack_multiplies(data: Any) -> None:
    stack = data.draw(layers(MXFP4ExpertsWeight, st.just(MXFP4Config()), most=2)).weight()

    for index, expected in enumerate(stack.dequantize()):
        expert = stack.expert(index)
        assert_same_bits(expert.dequantize(), expected)
        assert_reads_back(expert.get_linear(), expert, torch.bfloat16)


@pytest.fixture
def linear() -> torch.nn.Module:
    matrix = torch.arange(12.0).reshape(3, 4).half()
    return UnquantizedWeight(weight=matrix).get_linear(bias=torch.tensor([1.0, 2.0, 3.0]))


def test_leading_dimensions_and_empty_batches_pass_through(linear: torch.nn.Module) -> None:
    assert linear(torch.ones(2, 5, 4)).shape == (2, 5, 3)
    assert linear(torch.ones(0, 4)).shape == (0, 3)
    assert linear(torch.ones(4)).tolist() == [6 + 1, 22 + 2, 38 + 3]


def test_an_input_need_not_be_contiguous(linear: torch.nn.Module) -> None:
    x = torch.arange(8.0).reshape(4, 2).T

    assert torch.equal(linear(x), linear(x.contiguous()))


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        pytest.param(torch.ones(2, 3), ShapeError, r"expected \(\.\.\., 4\) = \(\.\.\., K\)", id="K"),
        pytest.param(torch.ones(2, 4, dtype=torch.int32), DtypeError, "got      int32", id="dtype"),
    ],
)
def test_a_wrong_input_is_named(
    linear: torch.nn.Module, x: torch.Tensor, error: type[QloadError], text: str
) -> None:
    with pytest.raises(error, match=text):
        linear(x)


@pytest.mark.usefixtures("seen_texts")
def test_a_bias_of_another_length_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"bias: wrong shape\n  expected \(3,\)"):
        UnquantizedWeight(weight=torch.ones(3, 4)).get_linear(bias=torch.ones(4))


@given(data=st.data())
@at_most(5)
def test_casting_a_module_casts_no_weight(data: Any) -> None:
    weight_type = list(CONFIGS)[1]
    weight = data.draw(layers(weight_type, CONFIGS[weight_type])).weight()

    module = weight.get_linear().half().float().double()

    for name, tensor in weight.fields().items():
        assert_same_bits(module.typed.fields()[name], tensor)
    assert set(module.state_dict()) == {*weight.fields(), "_extra_state"}


@pytest.mark.usefixtures("seen_texts")
def test_a_state_dict_of_another_order_is_refused_though_its_shapes_fit() -> None:
    """Marlin's words of N = 4 K have the shape of strips."""
    weight = GPTQWeight(
        config=GPTQConfig(4, 128, zeros=Stored()),
        qweight=torch.arange(16 * 512, dtype=torch.int32).view(16, 512),
        qzeros=torch.full((1, 64), -0x77777778, dtype=torch.int32),
        scales=torch.ones(1, 512).half(),
        g_idx=torch.zeros(128, dtype=torch.int32),
    )
    one, other = (repack(weight, layout).get_linear() for layout in ("marlin", "strips"))
    shapes = [{n: t.shape for n, t in each.typed.fields().items()} for each in (one, other)]
    assert shapes[0] == shapes[1]

    with pytest.raises(ArgumentError, match="expected strips"):
        other.load_state_dict(one.state_dict())
    other.load_state_dict(repack(weight, "strips").get_linear().state_dict())


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("x", "got"), [(None, "None"), ([1.0], "list of 1.0"), ("x", "'x'")], ids=["None", "a list", "a text"]
)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "quantized"])
def test_what_is_no_tensor_is_no_input_and_no_bias(x: Any, got: str, *, plain: bool) -> None:
    weight = UnquantizedWeight(weight=torch.ones(8, 128)) if plain else Case(K=128, N=8).weight()
    linear, name = weight.get_linear(), type(weight).__name__

    with pytest.raises(ArgumentError) as caught:
        linear(x)
    assert str(caught.value) == f"{name}: x\n  expected torch.Tensor\n  got      {got}"
    if x is not None:
        with pytest.raises(ArgumentError, match=f"^{name}: bias\n  expected torch.Tensor or None\n"):
            linear(torch.ones(1, 128), x)


@pytest.mark.usefixtures("seen_texts")
def test_a_product_names_the_argument_that_is_no_tensor_and_no_weight() -> None:
    with pytest.raises(ArgumentError, match=r"^weight\n  expected Weight\n  got      None"):
        plans.multiply(torch.ones(1, 2), None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^UnquantizedWeight: x\n"):
        plans.multiply(None, UnquantizedWeight(weight=torch.ones(2, 2)))  # type: ignore[arg-type]
