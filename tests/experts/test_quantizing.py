"""Experts that are quantized while they are loaded: each as alone, alike on all ranks; routers never."""

from typing import Any

import pytest
import torch

from qload import (
    BNB4Quantizer,
    DefaultWeightsLoader,
    EETQQuantizer,
    Fp8Quantizer,
    QuantizingLoader,
    Weights,
)
from qload.errors import MismatchError
from qload.parallel import FakeWorld
from qload.quantize.policy import Modules
from qload.testing import assert_same_bits
from tests.experts.expert_layers import FACTS, PREFIX, StoredExperts, assert_joined, plain, ranks

pytestmark = pytest.mark.usefixtures("seen_texts")

QUANTIZERS = [Fp8Quantizer(), Fp8Quantizer("tensor"), EETQQuantizer(), BNB4Quantizer()]


def stored(quantizer: Any, count: int = 3, **settings: Any) -> StoredExperts:
    loader = QuantizingLoader(DefaultWeightsLoader(), quantizer, **settings)
    make = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(t.shape, generator=make).half() for name, t in plain(count, 256, 128).items()
    }
    tensors["model.layers.0.mlp.gate.weight"] = torch.randn(count, 128, generator=make).half()
    return StoredExperts([], tensors, loader)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_experts_are_quantized_as_each_alone(quantizer: Any) -> None:
    own = stored(quantizer)

    made = own.load()

    assert made.gate_up.format == made.down.format == quantizer.format
    for expert in range(3):
        gate, up, down = own.meant(expert)
        gate_up, last = made.dequantize(expert)
        assert_same_bits(gate_up, torch.cat([gate, up]))
        assert_same_bits(last, down)
    assert_joined(ranks(2, lambda group: own.load(group, split="tensor")), made)
    (_, second) = ranks(2, lambda group: own.load(group, split="experts"))
    assert_same_bits(second.dequantize(0)[1], made.dequantize(2)[1])


def test_the_router_stays_as_it_is_stored() -> None:
    own = stored(Fp8Quantizer())
    weights: Weights = own.weights()

    weights.get_experts(PREFIX, facts=FACTS)
    router = weights.get_weights("model.layers.0.mlp.gate")

    assert router.format == "unquantized"
    assert_same_bits(router.fields()["weight"], own.tensors["model.layers.0.mlp.gate.weight"])
    assert weights.report().complete


def test_a_policy_of_some_experts_is_refused_on_all_ranks_before_a_read() -> None:
    own = stored(Fp8Quantizer(), policy=Modules(without=("experts.2",)))
    said = set()
    for group in FakeWorld(3):
        weights = own.weights(group)
        with pytest.raises(MismatchError) as caught:
            weights.get_experts(PREFIX, facts=FACTS, split="experts")
        said.add(str(caught.value))
        assert not weights.storage.reads  # type: ignore[attr-defined]
    assert len(said) == 1
    assert caught.value.tensor == f"{PREFIX}.2.gate_proj"
    assert (caught.value.expected, caught.value.got) == (f"fp8 as {PREFIX}.0.gate_proj", "unquantized")
