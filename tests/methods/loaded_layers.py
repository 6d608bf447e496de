"""Layers loaded on every rank of a world, and what they make of inputs that sum exactly, or within bounds."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload.detect import DefaultWeightsLoader
from qload.errors import CutError, DivideError
from qload.loader import WeightsLoader
from qload.parallel import Collectives, FakeWorld, Rank
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import DrawnLayer, assert_same_bits, assert_sums_exactly, assert_within_bound
from qload.weights import Weights

Make = Callable[[Weights], nn.Module]
PLAIN = DefaultWeightsLoader()


def weights_of(
    tensors: Mapping[str, Tensor], loader: WeightsLoader, group: Any = None, **options: Any
) -> Weights:
    """A rank's view of some tensors, in a storage of its own."""
    return Weights(MemoryStorage(dict(tensors)), loader=loader, process_group=group, **options)


def on_all_ranks(
    tensors: Mapping[str, Tensor],
    loader: WeightsLoader,
    world: int,
    make: Make,
    *inputs: Callable[[Rank], Any],
) -> list[Tensor]:
    """What the layer that each rank makes returns for its inputs; every tensor was used."""

    def work(group: Collectives) -> Tensor:
        weights = weights_of(tensors, loader, group)
        layer = make(weights)
        assert weights.report().complete
        here = Rank(group.rank(), group.size())
        y: Tensor = layer(*(take(here) for take in inputs))
        return y

    return FakeWorld(world).run(work)


def the_same_on_all_ranks(*asked: Any) -> Tensor:
    """What `on_all_ranks` returns, of which every rank has the same bits."""
    found = on_all_ranks(*asked)
    for other in found[1:]:
        assert_same_bits(other, found[0])
    return found[0]


def cut_for_rows(x: Tensor) -> Callable[[Rank], Tensor]:
    """Each rank's inputs of x."""
    return lambda rank: x.chunk(rank.world, -1)[rank.place]


def refusals(tensors: Mapping[str, Tensor], loader: WeightsLoader, world: int, make: Make) -> set[str]:
    """In which words the ranks refuse, all of them, with nothing used."""
    said = set()

    def work(group: Collectives) -> None:
        weights = weights_of(tensors, loader, group)
        with pytest.raises((CutError, DivideError)) as caught:
            make(weights)
        said.add(str(caught.value))
        assert not weights.report().used

    FakeWorld(world).run(work)
    return said


def assert_multiplies(kernel: Callable[[Tensor], Tensor], weight: Weight) -> None:
    """Exact sums where float32 can have them, else within the bound of one rounding after another."""
    __tracebackhide__ = True
    try:
        assert_sums_exactly(kernel, weight, torch.float32)
    except ValueError:
        generator = torch.Generator().manual_seed(weight.layer.K)
        assert_within_bound(kernel, weight, torch.randn(3, weight.layer.K, generator=generator))


def sums_exactly(weight: Weight) -> bool:
    """Whether float32 can sum the products of a weight exactly."""
    try:
        assert_sums_exactly(weight.get_linear(), weight, torch.float32)
    except ValueError:
        return False
    return True


def bias_of(N: int) -> Tensor:
    """Small integers, none of them 0."""
    return (torch.arange(N) % 7 + 1).float()


def with_bias(stored: DrawnLayer, name: str = "layer") -> dict[str, Tensor]:
    """A drawn layer's tensors, and a bias beside them where sums stay exact."""
    tensors = stored.named(name)
    return tensors | ({f"{name}.bias": bias_of(stored.N)} if sums_exactly(stored.weight()) else {})
