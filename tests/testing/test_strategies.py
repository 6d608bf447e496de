"""Layers that a kernel claims to take: the common contract by default, odd corners by name."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.errors import ArgumentError
from qload.formats import GPTQConfig, GPTQWeight
from qload.testing import DrawnLayer, Traits, assert_same_bits, layer_of, layers
from qload.testing.strategies import check_traits
from qload.testing.traits import CONTRACTS, contract
from tests.example_counts import at_most
from tests.paths import ROOT

FEW = at_most(8)


def zeros(drawn: DrawnLayer) -> set[int]:
    found = drawn.weight().codes().zeros
    assert found is not None
    return set(found.flatten().tolist())


@given(layers("gptq"))
@FEW
def test_gptq_is_symmetric_and_in_order_unless_more_is_asked(drawn: DrawnLayer) -> None:
    weight = drawn.weight()

    assert zeros(drawn) == {8}
    assert weight.config.positional or weight.layer.K == 128
    assert weight.g_idx.tolist() == [k // 128 for k in range(weight.layer.K)]
    assert not bool((drawn.tensors["qzeros"] & 0xF == 0xF).any())


@given(layers("gptq", act_order=True, groups=(32, 64), bits=8))
@FEW
def test_act_order_groups_and_bits_are_asked_for(drawn: DrawnLayer) -> None:
    config = drawn.weight().config

    assert (config.bits, config.positional) == (8, False)
    assert config.group_size in (32, 64)
    assert zeros(drawn) == {128}


@given(layers("gptq", zeros="wrapping") | layers("gptq", zeros="wrapping", bits=2))
@FEW
def test_wrapping_zero_points_are_asked_for_by_name(drawn: DrawnLayer) -> None:
    assert 0 in zeros(drawn)


@given(layers("gptq", symmetric=False))
@FEW
def test_other_zero_points_do_not_wrap(drawn: DrawnLayer) -> None:
    assert zeros(drawn) <= set(range(1, 16))
    assert len(zeros(drawn)) > 1


@given(layers("awq", shapes=((64, 256), (128, 128)), dtype="bfloat16"))
@FEW
def test_shapes_and_a_dtype_are_asked_for(drawn: DrawnLayer) -> None:
    assert drawn.weight().shape in ((64, 256), (128, 128))
    assert drawn.tensors["scales"].dtype == torch.bfloat16


@pytest.mark.parametrize("format", CONTRACTS)
def test_every_corner_of_every_format_is_a_sound_layer(format: str) -> None:
    for traits in contract(format).corners(format):
        weight = layer_of(traits, 128, 256).weight()
        assert bool(weight.dequantize().isfinite().all())
        assert_same_bits(layer_of(traits, 128, 256).weight().dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"zeros": "v3"}, r"gptq: zeros\n  expected one of 'v1', 'v2', 'wrapping'"),
        ({"variant": "block"}, "gptq: variant"),
        ({"groups": (0,)}, r"gptq: groups\n  expected sizes of at least 1, or -1"),
        (
            {"configs": st.just(GPTQConfig(4, 32)), "symmetric": True},
            r"symmetric\n  expected None together with configs",
        ),
    ],
)
def test_what_no_layer_has_is_refused_before_anything_is_drawn(asked: dict[str, object], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        layers("gptq", **asked)


@pytest.mark.parametrize(
    ("format", "size", "lawful"),
    [
        *(("gptq", size, lawful) for size, lawful in ((-2, False), (-1, True), (0, False), (1, True))),
        *(("eetq", size, lawful) for size, lawful in ((-1, True), (0, True), (1, False))),
    ],
)
def test_groups_have_sizes_where_the_format_has_groups(format: str, size: int, lawful: bool) -> None:
    traits = Traits(format, bits=8, group_size=size, zeros="v1" if format == "gptq" else "")
    if lawful:
        check_traits(traits)
        return
    with pytest.raises(ArgumentError) as caught:
        check_traits(traits)

    assert str(caught.value).splitlines() == [
        f"{format}: groups",
        "  expected sizes of at least 1, or -1",
        f"  got      {size}",
    ]


def test_symmetric_zero_points_that_wrap_are_refused() -> None:
    with pytest.raises(ArgumentError, match="False for zero points that wrap"):
        layer_of(Traits("gptq", 4, 32, zeros="wrapping"), 64, 128)
    with pytest.raises(ArgumentError, match="expected one of unquantized"):
        layers("aqlm")


@given(layers(GPTQWeight, st.just(GPTQConfig(bits=4, group_size=32, positional=True))))
@FEW
def test_configs_of_ones_own_draw_all_that_files_may_hold(drawn: DrawnLayer) -> None:
    assert drawn.weight().config.group_size == 32


@pytest.mark.slow
def test_a_name_is_imported_when_it_is_used_and_torch_not_before() -> None:
    code = "import sys, qload.testing, qload.conformance, qload.conformance.plugin; "
    code += "from qload.conformance import LinearKernelSuite, LoaderSuite, PackerSuite, ExpertsKernelSuite; "
    code += "sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_layer_shows_its_traits_sizes_and_seed() -> None:
    """Hypothesis prints it as the falsifying example."""
    layer = layer_of(Traits("gptq", 4, 32, zeros="v1"), 64, 128, seed=3)

    assert repr(layer).startswith("DrawnLayer(GPTQConfig(bits=4, group_size=32")
    assert repr(layer).endswith("'N': 64, 'K': 128, 'G': 4}, gptq.v1.w4.g32, seed 3)")
