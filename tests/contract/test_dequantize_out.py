"""Argument `out` of `dequantize`: equal errors for every format, with native code and without."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload import native
from qload.errors import ArgumentError, ShapeError
from qload.kernel_formats import StripsWeight, repack
from qload.layouts.packing import Order
from qload.testing import Traits, assert_same_bits, layer_of, layers
from tests.example_counts import at_most
from tests.format_cases import CONFIGS, every_format

BOTH = pytest.mark.parametrize("how", [nullcontext, native.reference], ids=["native", "reference"])
few = at_most(5)


def layer(K: int = 256, N: int = 128, group: int = 32) -> Any:
    return layer_of(Traits("gptq", 4, group, symmetric=False, zeros="v1"), N, K, filling="noise").weight()


@every_format
@BOTH
@few
@given(data=st.data())
def test_only_a_tensor_of_the_weights_shape_is_written_to(weight_type: Any, how: Any, data: Any) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type])).weight()
    *rest, last = weight.shape
    wrong = [(*rest, last + 1), (2 * rest[0], *rest[1:], last), (1, *weight.shape), ()]

    with how():
        for shape in wrong:
            with pytest.raises(ShapeError, match="out"):
                weight.dequantize(out=torch.empty(shape))
        for out in (
            torch.empty(weight.shape, dtype=torch.int8),
            torch.empty(weight.shape, device="meta"),
            [],
        ):
            with pytest.raises(ArgumentError, match="out"):
                weight.dequantize(out=out)


@BOTH
def test_elements_that_share_a_place_are_refused_and_any_other_strides_are_written(how: Any) -> None:
    weight = layer()
    N, K = weight.shape
    memory = torch.zeros(2 * N, K)
    with how():
        want = weight.dequantize()
        for out in (torch.zeros(1, K).expand(N, K), memory.as_strided((N, K), (1, 1))):
            with pytest.raises(ArgumentError, match="a place of its own"):
                weight.dequantize(out=out)
        for out in (memory[::2], torch.empty(K, N).T, torch.empty(N, K + 3)[:, 3:]):
            assert_same_bits(weight.dequantize(out=out).contiguous(), want)


@BOTH
def test_a_weights_own_tensor_is_not_written_to(how: Any) -> None:
    weight = layer(K=8, N=8, group=8)
    held = replace(weight, scales=torch.rand(64).half().view(8, 8)[:1])

    with how(), pytest.raises(ArgumentError, match="memory of its own"):
        held.dequantize(out=held.scales.as_strided((8, 8), (8, 1)))


@BOTH
@pytest.mark.parametrize("k_group", [torch.full((256,), 8), torch.full((256,), -1), torch.zeros(100).long()])
def test_groups_that_there_are_not_are_never_read(how: Any, k_group: torch.Tensor) -> None:
    codes = replace(layer().codes(), k_group=k_group)

    with how(), pytest.raises((RuntimeError, IndexError)):
        codes.dequantize()


def test_lazy_views_are_moved_as_what_they_stand_for() -> None:
    order, x = Order("(kp i) n -> kp n i", i=8), torch.randn(64, 32, dtype=torch.complex64)

    for lazy in (x.conj(), x.conj().imag):
        assert torch.equal(order.undo(order.apply(lazy)), lazy)
    assert torch.equal(order.undo(order.apply(x.to(torch.complex128))), x.to(torch.complex128))


def test_strips_can_be_made_of_their_own_tensors() -> None:
    made = repack(layer(), "strips")

    again = StripsWeight(**made.fields(), config=made.config)

    assert_same_bits(again.dequantize()[: made.layer.N, : made.layer.K], made.dequantize())


@pytest.mark.parametrize("threads", [0, -1, 1 << 31, "2", 1.5, True])
def test_threads_are_a_number_that_there_can_be(threads: Any) -> None:
    with pytest.raises(ArgumentError, match="threads"), native.using(threads=threads):
        pass
