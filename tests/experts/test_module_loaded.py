"""Experts that were loaded, as a layer: the shares of all ranks add up to what the whole layer gives."""

from typing import Any

import pytest
import torch

from qload import ExpertFacts
from qload.experts import GatedActivation
from qload.kernels.bounds import exact
from tests.experts.bounds import Matrices, assert_within
from tests.experts.expert_layers import PREFIX, ranks, stored_plain


def product(made: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> list[Any]:
    """Each token through each of its experts, in float64, with what float32 may be off by."""
    rows = []
    for row, chosen, own in zip(x, ids.tolist(), weights, strict=True):
        total = exact(torch.zeros(len(row)))
        for expert, weight in zip(chosen, own, strict=True):
            gate_up, down = made.dequantize(expert)
            gates, ups = made.gate_up_bias[expert].chunk(2)
            matrices = Matrices(*gate_up.chunk(2), down, gates, ups, made.down_bias[expert])
            first, last = weight, torch.ones(())
            if made.facts.side == "output":
                first, last = last, first
            total += matrices(exact(row) * exact(first), "silu") * exact(last)
        rows.append(total)
    return rows


@pytest.mark.parametrize("side", ["output", "input"])
@pytest.mark.parametrize(
    ("world", "how"),
    [
        (1, {}),
        (2, {"split": "tensor"}),
        (4, {"split": "experts"}),
        (4, {"split": "both", "expert_ranks": 2}),
    ],
    ids=str,
)
def test_what_all_ranks_give_adds_up(side: Any, world: int, how: Any) -> None:
    stored = stored_plain(5, biased=True)
    stored.tensors = {name: tensor.float() / 1024 for name, tensor in stored.tensors.items()}
    facts = ExpertFacts(GatedActivation("silu"), side)
    make = torch.Generator().manual_seed(3)
    x, weights = torch.randn(6, 8, generator=make), torch.rand(6, 2, generator=make)
    ids = torch.stack([torch.randperm(5, generator=make)[:2] for _ in range(6)])
    whole = stored.weights().get_experts(PREFIX, facts=facts)

    parts = ranks(world, lambda group: stored.weights(group).get_experts(PREFIX, facts=facts, **how))

    total = sum(part.get_linear()(x, ids, weights) for part in parts)
    for got, want in zip(total, product(whole, x, ids, weights), strict=True):
        assert_within(got, want)
