"""Every layout has an inverse, and no layout changes a value."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qload.errors import ArgumentError, RepackError
from qload.formats import AWQWeight, GPTQWeight, UnquantizedWeight
from qload.kernels import LAYOUTS, repack, restore
from qload.spec import Weight
from qload.testing import assert_same_bits, layers
from tests.rooms import CONFIGS


def assert_same_weight(got: Weight, want: Weight) -> None:
    assert (type(got), got.config, got.layer) == (type(want), want.config, want.layer)
    for name, tensor in want.fields().items():
        assert_same_bits(got.fields()[name], tensor)


def can_say(weight: Weight, layout: str) -> bool:
    """Whether a layout can say a weight: from the formats' facts, not from the product."""
    codes = weight.codes()
    assert codes.zeros is not None
    K, highest = weight.layer.K, int(codes.zeros.max())
    if layout == "awq":
        in_order = torch.equal(codes.k_group, torch.arange(K) * codes.scales.shape[1] // K)
        return codes.bits == 4 and highest <= 15 and K % codes.scales.shape[1] == 0 and in_order
    fits = highest < 2**codes.bits or layout == "exllama" or weight.config.zeros.name == layout
    return fits and (weight.format == "gptq" or K % 8 == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("room", [GPTQWeight, AWQWeight], ids=lambda room: room.format)
@given(data=st.data())
@settings(max_examples=40)
def test_a_repacked_weight_means_the_same_and_can_be_restored(
    room: type[Weight], layout: str, data: Any
) -> None:
    weight = data.draw(layers(room, CONFIGS[room])).weight()
    try:
        packed = repack(weight, layout)
    except RepackError:
        assert not can_say(weight, layout)
        return

    assert can_say(weight, layout)
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_weight(restore(packed), weight)


@pytest.mark.parametrize("layout", ["exllama", "gptq_v2"])
@given(data=st.data())
@settings(max_examples=20)
def test_out_is_overwritten_and_returned(layout: str, data: Any) -> None:
    weight = data.draw(layers(AWQWeight, CONFIGS[AWQWeight], K=768)).weight()
    out = repack(weight, layout)
    fresh = {name: tensor.clone() for name, tensor in out.fields().items()}
    places = {name: tensor.data_ptr() for name, tensor in out.fields().items()}
    for name in ("qweight", "qzeros"):
        out.fields()[name].fill_(-1)

    again = repack(weight, layout, out=out)

    assert {name: tensor.data_ptr() for name, tensor in again.fields().items()} == places
    for name, tensor in again.fields().items():
        assert_same_bits(tensor, fresh[name])


@given(data=st.data())
@settings(max_examples=10)
def test_a_repacked_weight_shares_no_memory_with_its_source(data: Any) -> None:
    first = data.draw(layers(GPTQWeight, CONFIGS[GPTQWeight])).weight()
    for layout in ("exllama", "gptq_v2"):
        try:
            packed = repack(first, layout)
        except RepackError:
            continue
        for weight in (packed, restore(packed)):
            shared = {t.data_ptr() for t in weight.fields().values()} & {
                t.data_ptr() for t in first.fields().values()
            }
            assert not shared


@given(data=st.data())
@settings(max_examples=5)
def test_out_of_another_shape_is_refused(data: Any) -> None:
    small, large = (data.draw(layers(AWQWeight, CONFIGS[AWQWeight], K=768, N=n)) for n in (32, 64))

    with pytest.raises(ArgumentError, match="out\n  expected a ExllamaWeight"):
        repack(large.weight(), "exllama", out=repack(small.weight(), "exllama"))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        pytest.param(lambda w: repack(w, "marvellous"), "one of gptq, gptq_v2, awq, exllama", id="unknown"),
        pytest.param(lambda w: repack(w, "gptq"), "has no codes to repack", id="plain"),
    ],
)
def test_what_cannot_be_repacked_is_refused_with_the_reason(call: Any, text: str) -> None:
    with pytest.raises((ArgumentError, RepackError), match=text):
        call(UnquantizedWeight(weight=torch.zeros(8, 8)))
