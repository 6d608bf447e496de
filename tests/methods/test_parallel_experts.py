"""Experts on the ranks of a world: by tensor, by expert and both, their outputs summed to those of all."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload import ExpertFacts, ExpertsWeight
from qload.detect import loader_from_config
from qload.errors import ArgumentError, DivideError
from qload.experts import GatedActivation
from qload.methods import ParallelExperts
from qload.parallel import FakeWorld, Rank
from tests.experts.expert_layers import NAMES, PREFIX
from tests.methods.loaded_layers import PLAIN, weights_of

pytestmark = pytest.mark.usefixtures("seen_texts")

FACTS = ExpertFacts(GatedActivation("silu"))
E, H, INNER = 5, 8, 16


def tensors() -> dict[str, Tensor]:
    """Matrices of small integers."""
    shapes = dict(zip(NAMES, [(INNER, H), (INNER, H), (H, INNER)], strict=True))
    return {
        f"{PREFIX}.{expert}.{name}.weight": ((torch.arange(INNER * H) * (expert + 3)) % 7 - 3)
        .reshape(shape)
        .float()
        for expert in range(E)
        for name, shape in shapes.items()
    }


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens so large that silu keeps a gate or makes it 0, whose sums are exact; their experts."""
    x = 1024.0 * ((torch.arange(6 * H) % 5) - 2).reshape(6, H)
    ids = torch.tensor([[token % E, (token + 2) % E] for token in range(6)])
    return x, ids, torch.tensor([[0.5, 0.25]]).expand(6, 2)


def all_of_them() -> Tensor:
    """What the experts make on one rank."""
    made = weights_of(tensors(), PLAIN).get_experts(PREFIX, facts=FACTS)
    y: Tensor = made.get_linear()(*inputs())
    return y


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("split", "runs"), [("tensor", None), ("experts", None), ("both", 2)])
def test_the_ranks_sum_to_what_all_experts_make(world: int, split: Any, runs: int | None) -> None:
    if split == "both" and world == 1:
        runs = 1

    def work(group: Any) -> Tensor:
        weights = weights_of(tensors(), PLAIN, group)
        layer = ParallelExperts.load(
            weights, PREFIX, split=split, expert_ranks=runs, facts=FACTS, reduce_results=True
        )
        assert weights.report().complete
        y: Tensor = layer(*inputs())
        return y

    want = all_of_them()
    assert want.any()
    for got in FakeWorld(world).run(work):
        assert torch.equal(got, want)


def test_ranks_keep_their_summands_unless_they_are_asked_to_sum() -> None:
    layers = [
        ParallelExperts.load(weights_of(tensors(), PLAIN, rank), PREFIX, facts=FACTS) for rank in FakeWorld(2)
    ]

    assert torch.equal(torch.stack([layer(*inputs()) for layer in layers]).sum(0), all_of_them())
    with pytest.raises(ArgumentError, match="summed, gathered"):
        ParallelExperts.load(
            weights_of(tensors(), PLAIN, Rank(0, 2)), PREFIX, facts=FACTS, reduce_results=True
        )


def test_experts_that_are_whole_on_every_rank_are_not_summed() -> None:
    def work(group: Any) -> Tensor:
        weights = weights_of(tensors(), PLAIN, group)
        layer = ParallelExperts.load(weights, PREFIX, split=None, facts=FACTS, reduce_results=True)
        y: Tensor = layer(*inputs())
        return y

    for got in FakeWorld(2).run(work):
        assert torch.equal(got, all_of_them())


def test_more_ranks_than_experts_are_refused_on_every_rank() -> None:
    said = set()
    for rank in FakeWorld(8):
        with pytest.raises(DivideError) as caught:
            ParallelExperts.load(weights_of(tensors(), PLAIN, rank), PREFIX, split="experts", facts=FACTS)
        said.add(str(caught.value))

    assert len(said) == 1


def test_experts_are_made_by_whoever_is_asked() -> None:
    seen: list[ExpertsWeight] = []

    def make(weight: ExpertsWeight, maximum: Any) -> nn.Module:
        seen.append(weight)
        assert maximum is None
        return weight.get_linear(activations="unquantized")

    layer = ParallelExperts.load(weights_of(tensors(), PLAIN), PREFIX, facts=FACTS, make_experts=make)

    assert torch.equal(layer(*inputs()), all_of_them())
    assert seen[0].shape == (E, H, INNER)


def test_one_scale_of_all_between_is_that_of_all_ranks() -> None:
    """What goes into down, of which a rank has a part, is quantized by a token's largest on all ranks."""
    scheme = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    stored = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": stored, "input_activations": scheme}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    codes = {name: tensor.to(torch.int8) for name, tensor in tensors().items()}
    scales = {f"{name}_scale": torch.ones(tensor.shape[0], 1) for name, tensor in codes.items()}
    loader = loader_from_config(config)

    def found(group: Any, split: Any) -> Any:
        """What finds a maximum, as the module of this rank's experts is given it."""
        seen: list[Any] = []

        def make(weight: ExpertsWeight, maximum: Any) -> nn.Module:
            seen.append(maximum)
            return weight.get_linear(maximum=maximum)

        weights = weights_of(codes | scales, loader, group)
        layer = ParallelExperts.load(weights, PREFIX, split=split, facts=FACTS, make_experts=make)
        assert layer(*inputs()).any()
        return seen[0]

    for split in ("experts", None):
        assert FakeWorld(2).run(lambda group: found(group, split)) == [None, None]  # noqa: B023
    assert FakeWorld(1).run(lambda group: found(group, "tensor")) == [None]
    largest = FakeWorld(4).run(lambda group: found(group, "tensor")(torch.tensor([group.rank()])).item())
    assert largest == [3, 3, 3, 3]
    with pytest.raises(ArgumentError, match="maximum_over"):
        found(Rank(0, 2), "tensor")
