"""Embeddings, heads and experts of every format on the ranks of a world: rows, logits and sums of one."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qload.errors import CutError, DivideError
from qload.methods import ParallelExperts, ParallelLMHead, VocabParallelEmbedding
from qload.parallel import FakeWorld
from qload.spec import Weight
from qload.testing import DrawnLayer, assert_same_bits, layers
from tests.experts.expert_layers import FACTS, PREFIX, every_matrix, experts
from tests.format_cases import CONFIGS
from tests.methods.loaded_layers import (
    assert_multiplies,
    on_all_ranks,
    refusals,
    the_same_on_all_ranks,
    weights_of,
    with_bias,
)

every_world = pytest.mark.parametrize("world", [1, 2, 3, 4])


def can_be_shared(stored: DrawnLayer, world: int) -> bool:
    """Whether each rank would have some of the outputs."""
    try:
        for rank in FakeWorld(world):
            weights_of(stored.named(), stored.loader(), rank).get_partial_weights_col("layer")
    except (CutError, DivideError):
        return False
    return True


@every_matrix
@every_world
@given(data=st.data())
@settings(max_examples=2)
def test_a_head_of_every_format_gives_the_logits_of_the_whole_vocabulary(
    weight_type: type[Weight], world: int, data: Any
) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type], fillings=("count",)))
    tensors = with_bias(stored)
    vocab = stored.N - 1 if stored.N > 1 else 1
    bias = tensors.get("layer.bias", torch.zeros(stored.N))[:vocab]

    def make(weights: Any) -> ParallelLMHead:
        return ParallelLMHead.load(weights, "layer", vocab=vocab)

    if not can_be_shared(stored, world):
        assert len(refusals(tensors, stored.loader(), world, make)) == 1
        return

    def multiply(x: Tensor) -> Tensor:
        found = the_same_on_all_ranks(tensors, stored.loader(), world, make, lambda rank: x)
        assert found.shape == (x.shape[0], vocab)
        padding = stored.weight().get_linear()(x)[:, vocab:]  # which no logit is of
        return torch.cat([found - bias, padding], -1)

    assert_multiplies(multiply, stored.weight())


@every_matrix
@every_world
@given(data=st.data())
@settings(max_examples=2)
def test_an_embedding_of_every_format_gives_the_rows_that_it_means(
    weight_type: type[Weight], world: int, data: Any
) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))

    def make(weights: Any) -> VocabParallelEmbedding:
        return VocabParallelEmbedding.load(weights, "layer")

    if not can_be_shared(stored, world):
        assert len(refusals(stored.named(), stored.loader(), world, make)) == 1
        return
    want = stored.weight().dequantize(
        next(iter(stored.tensors.values())).dtype if stored.weight_type.plain else torch.float32
    )
    for got in on_all_ranks(
        stored.named(), stored.loader(), world, make, lambda rank: torch.arange(stored.N)
    ):
        assert_same_bits(got + 0, want + 0)  # of two zeros the sign is nobody's promise


@every_matrix
@every_world
@given(data=st.data())
@settings(max_examples=2)
def test_whole_experts_of_every_format_sum_to_what_all_make(
    weight_type: type[Weight], world: int, data: Any
) -> None:
    """Two experts a token, or one: a sum of two has no order."""
    stored = data.draw(experts(weight_type, most=4))
    hidden, chosen = stored.drawn[0][0].K, min(2, stored.count)
    x = ((torch.arange(5 * hidden) % 5) - 2).reshape(5, hidden).float()
    ids = (torch.arange(5)[:, None] + torch.arange(chosen)) % stored.count
    routed = (x, ids, torch.full((5, chosen), 0.3))

    def work(group: Any) -> Tensor:
        layer = ParallelExperts.load(
            stored.weights(group), PREFIX, split="experts", facts=FACTS, reduce_results=True
        )
        y: Tensor = layer(*routed)
        return y

    if world > stored.count:
        with pytest.raises(DivideError):
            FakeWorld(world).run(work)
        return
    want = stored.load().get_linear()(*routed)
    for got in FakeWorld(world).run(work):
        assert_same_bits(got + 0, want + 0)
