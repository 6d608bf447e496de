"""A weight copied into a layer's tensors: the bits of a fresh load, or nothing at all."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from qload import Linear, copy_into
from qload.errors import ArgumentError
from qload.formats import GPTQWeight, UnquantizedWeight
from qload.kernel_formats import repack
from qload.testing import assert_same_bits
from tests.kernels.mp_layers import Case

pytestmark = pytest.mark.usefixtures("seen_texts")

LAYOUTS = pytest.mark.parametrize("layout", ["gptq", "marlin", "strips", "exllama"])


def made(seed: int, layout: str = "gptq", **changed: Any) -> Any:
    weight: GPTQWeight = Case(group=64, seed=seed, **changed).weight()
    return weight if layout == "gptq" else repack(weight, layout)


@LAYOUTS
def test_a_layer_has_the_bits_of_a_fresh_load_where_its_own_were(layout: str) -> None:
    linear = Linear(made(0, layout), torch.zeros(64))
    before = {name: tensor.data_ptr() for name, tensor in linear.named_buffers()}

    copy_into(linear, made(1, layout), torch.ones(64))

    for name, tensor in Linear(made(1, layout), torch.ones(64)).named_buffers():
        assert_same_bits(linear.get_buffer(name), tensor)
    assert {name: tensor.data_ptr() for name, tensor in linear.named_buffers()} == before


def named(weight: Any, name: str) -> Any:
    return replace(weight, layer=replace(weight.layer, name=name))


@pytest.mark.parametrize(
    ("wrong", "change"),
    [
        ("format", lambda: UnquantizedWeight(weight=torch.ones(64, 256))),
        ("format", lambda: made(1, "marlin")),
        ("config", lambda: Case(group=128).weight()),
        ("layer", lambda: made(1, N=128)),
        ("layer", lambda: named(made(1), "v_proj")),
        ("scales", lambda: made(1).holding({"scales": torch.ones(4, 64)})),
        ("qzeros", lambda: made(1).holding({"qzeros": torch.ones(4, 7, dtype=torch.int32)})),
    ],
)
def test_what_differs_is_refused_and_nothing_is_written(wrong: str, change: Callable[[], Any]) -> None:
    linear = Linear(named(made(0), "k_proj"))

    with pytest.raises(ArgumentError, match=f"k_proj: {wrong}"):
        copy_into(linear, change())
    for name, tensor in made(0).fields().items():
        assert_same_bits(linear.get_buffer(name), tensor)


def test_a_bias_that_does_not_fit_is_refused_and_nothing_is_written() -> None:
    for own, bias in (
        (None, torch.ones(64)),
        (torch.ones(64), torch.ones(65)),
        (torch.ones(64), torch.ones(64).half()),
    ):
        linear = Linear(made(0), own)
        with pytest.raises(ArgumentError, match="weight: bias"):
            copy_into(linear, made(1), bias)
        assert_same_bits(linear.get_buffer("qweight"), made(0).qweight)


def test_a_layer_without_a_name_takes_one_that_has_one() -> None:
    linear = Linear(made(0))

    copy_into(linear, named(made(1), "k_proj"))

    assert_same_bits(linear.get_buffer("qweight"), made(1).qweight)
