"""On a CUDA device weights hold, mean and multiply the same as on the CPU."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qload.errors import CutError, DivideError
from qload.formats import Exl3Weight
from qload.kernel_formats import repack, restore
from qload.parallel import Rank
from qload.spec import Weight
from qload.testing import (
    assert_reads_back,
    assert_same_bits,
    assert_sums_exactly,
    assert_within_bound,
    layers,
)
from qload.weights import Weights
from tests.format_cases import CONFIGS, every_format

pytestmark = pytest.mark.gpu
few = settings(max_examples=10)


def on_device(stored: Any, rank: Rank) -> Weights:
    return Weights(stored.storage(), loader=stored.loader(), device="cuda", process_group=rank)


@every_format
@given(data=st.data())
@few
def test_a_weight_on_the_device_means_what_it_means_on_the_cpu(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))

    weight = on_device(stored, Rank(0, 1)).get_weights("layer")

    assert weight.device.type == "cuda"
    assert_same_bits(weight.dequantize().cpu(), stored.weight().dequantize())
    assert_same_bits(stored.weight().to("cuda").dequantize(), weight.dequantize())


@every_format
@given(data=st.data())
@few
def test_shares_on_the_device_are_the_whole(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type], N=256, K=768))

    try:
        columns = [on_device(stored, Rank(i, 2)).get_weights_col("layer").dequantize() for i in (0, 1)]
        rows = [on_device(stored, Rank(i, 2)).get_weights_row("layer").dequantize() for i in (0, 1)]
    except (CutError, DivideError) as refused:
        pytest.skip(str(refused))

    whole = stored.weight().dequantize()
    assert_same_bits(torch.cat(columns, -2).cpu(), whole)
    assert_same_bits(torch.cat(rows, -1).cpu(), whole)


@pytest.mark.parametrize("layout", ["exllama", "gptq_v2"])
@given(data=st.data())
@few
def test_repacking_on_the_device_has_the_bits_of_the_cpu(layout: str, data: Any) -> None:
    weight_type = next(weight_type for weight_type in CONFIGS if weight_type.format == "awq")
    stored = data.draw(layers(weight_type, CONFIGS[weight_type], K=768))

    packed = repack(stored.weight().to("cuda"), layout)

    for name, tensor in repack(stored.weight(), layout).fields().items():
        assert_same_bits(packed.fields()[name].cpu(), tensor)
    assert_same_bits(restore(packed).fields()["qweight"].cpu(), stored.tensors["qweight"])


@every_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@given(data=st.data())
@few
def test_a_linear_on_the_device_passes_the_three_oracles(
    weight_type: type[Weight], dtype: torch.dtype, data: Any
) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], fillings=("count",))).weight()
    if len(weight.shape) != 2:
        pytest.skip("no matrix: a stack of experts")
    linear = weight.get_linear().to("cuda")
    there = weight.to("cuda")

    assert_reads_back(linear, there, dtype)
    if weight_type is not Exl3Weight:  # each of its values is a sum of 128 by 128
        assert_sums_exactly(linear, there, dtype)
    assert_within_bound(linear, there, torch.randn(3, weight.layer.K, device="cuda").to(dtype))
