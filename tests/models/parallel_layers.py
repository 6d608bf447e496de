"""Layers that load through `Weights`: cut or whole, in every format, they are the whole layer's product."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qload.formats import Exl3Weight, HQQConfig
from qload.loader import FormatLoader, Heads
from qload.methods import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from qload.spec import Weight
from qload.testing import DrawnLayer, assert_same_bits, layers
from tests.experts.expert_layers import every_matrix
from tests.format_cases import CONFIGS, lawful
from tests.methods.loaded_layers import (
    assert_multiplies,
    cut_for_rows,
    on_all_ranks,
    refusals,
    the_same_on_all_ranks,
    weights_of,
    with_bias,
)

every_world = pytest.mark.parametrize("world", [1, 2, 4])


def alike(first: DrawnLayer, other: DrawnLayer) -> DrawnLayer:
    """Another layer whose inputs are grouped as those of the first."""
    indexed = {spec.name for spec in first.weight_type.tensors(first.config) if spec.index_of}
    for name in indexed & set(first.tensors):
        other.tensors[name] = first.tensors[name]
    return other


@every_matrix
@every_world
@given(data=st.data())
@settings(max_examples=2)
def test_columns_of_every_format_are_the_whole_product(
    weight_type: type[Weight], data: Any, world: int
) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type], N=64 * 4, most=1, fillings=("count",)))
    tensors = with_bias(stored)
    bias = tensors.get("layer.bias", torch.zeros(stored.N))

    def make(weights: Any) -> ColumnParallelLinear:
        return ColumnParallelLinear.load(weights, "layer", gather_output=True)

    if world > 1 and not lawful(stored.config, "N", stored.N, world, stored.K):
        assert len(refusals(tensors, stored.loader(), world, make)) == 1
        return

    def multiply(x: Tensor) -> Tensor:
        return the_same_on_all_ranks(tensors, stored.loader(), world, make, lambda rank: x) - bias

    assert_multiplies(multiply, stored.weight())


@every_matrix
@every_world
@given(data=st.data())
@settings(max_examples=2)
def test_rows_of_every_format_sum_to_the_whole_product(
    weight_type: type[Weight], data: Any, world: int
) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type], K=384 * world, most=1, fillings=("count",)))
    tensors = with_bias(stored)
    bias = tensors.get("layer.bias", torch.zeros(stored.N))

    def make(weights: Any) -> RowParallelLinear:
        return RowParallelLinear.load(weights, "layer")

    if world > 1 and not lawful(stored.config, "K", stored.K, world, stored.K):
        assert len(refusals(tensors, stored.loader(), world, make)) == 1
        return

    def multiply(x: Tensor) -> Tensor:
        return the_same_on_all_ranks(tensors, stored.loader(), world, make, cut_for_rows(x)) - bias

    assert_multiplies(multiply, stored.weight())


@every_matrix
@every_world
@given(data=st.data())
@settings(max_examples=2)
def test_a_replicated_layer_of_every_format_is_whole_on_every_rank(
    weight_type: type[Weight], data: Any, world: int
) -> None:
    """Trap 59: loaded whole, quantized like the rest, with its bias on every rank."""
    stored = data.draw(layers(weight_type, CONFIGS[weight_type], most=1, fillings=("count",)))
    tensors = with_bias(stored)
    bias = tensors.get("layer.bias", torch.zeros(stored.N))

    def multiply(x: Tensor) -> Tensor:
        def make(weights: Any) -> ReplicatedLinear:
            return ReplicatedLinear.load(weights, "layer")

        return the_same_on_all_ranks(tensors, stored.loader(), world, make, lambda rank: x) - bias

    assert_multiplies(multiply, stored.weight())


@every_matrix
@every_world
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@given(data=st.data())
@settings(max_examples=2)
def test_trap_66_fewer_heads_of_keys_than_ranks_are_on_several_with_their_biases(
    weight_type: type[Weight], fused: bool, data: Any, world: int
) -> None:
    tensors, loader = drawn_heads(data, weight_type, fused)
    names = [name for name in ("qkv", "q", "k", "v") if any(key.startswith(f"{name}.") for key in tensors)]
    alone = weights_of(tensors, loader)
    whole = alone.get_weights("qkv") if fused else alone.get_multi_weights_col(names)
    biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
    bias = torch.cat(biases) if biases else torch.zeros(whole.layer.N)

    def make(weights: Any) -> QKVParallelLinear:
        return QKVParallelLinear.load(weights, "qkv" if fused else names, Heads(8, 2), head_size=64)

    def multiply(x: Tensor) -> Tensor:
        return put_together(on_all_ranks(tensors, loader, world, make, lambda rank: x), world) - bias

    assert_multiplies(multiply, whole)


COUNTS = (8, 2, 2)  # heads of queries, keys and values, of 64


def drawn_to_cut(data: Any, weight_type: type[Weight], N: int) -> DrawnLayer:
    """Draw a layer of exact sums whose outputs are cut at multiples of 64."""
    if weight_type is Exl3Weight:
        pytest.skip("EXL3 is cut at multiples of 128, and each of its weights is a sum of 16,384 values")
    drawn: DrawnLayer = data.draw(layers(weight_type, CONFIGS[weight_type], N=N, most=1, fillings=("count",)))
    assume(not isinstance(drawn.config, HQQConfig) or drawn.config.axis == 1)  # axis 0: outputs stay whole
    return drawn


def drawn_heads(data: Any, weight_type: type[Weight], fused: bool) -> tuple[dict[str, Tensor], FormatLoader]:
    """Queries, keys and values with biases, as one layer or as three."""
    N = 64 * (sum(COUNTS) if fused else COUNTS[0])
    first = drawn_to_cut(data, weight_type, N)
    if fused:
        return with_bias(first, "qkv"), first.loader()
    more = layers(weight_type, st.just(first.config), N=64 * COUNTS[1], K=first.K, fillings=("count",))
    k, v = (alike(first, data.draw(more)) for _ in "kv")
    return with_bias(first, "q") | with_bias(k, "k") | with_bias(v, "v"), first.loader()


def put_together(shares: list[Tensor], world: int) -> Tensor:
    """The heads of all ranks in the order of the whole layer; those on several ranks are the same there."""
    here = [64 * max(1, count // world) for count in COUNTS]
    whole = []
    for part, count in enumerate(COUNTS):
        runs, copies = [share.split(here, -1)[part] for share in shares], max(1, world // count)
        for rank, run in enumerate(runs):
            assert_same_bits(run, runs[rank - rank % copies])
        whole += runs[::copies]
    return torch.cat(whole, -1)


@every_matrix
@every_world
@given(data=st.data())
@settings(max_examples=2)
def test_gate_and_up_are_cut_each_fused_or_not(weight_type: type[Weight], data: Any, world: int) -> None:
    first = drawn_to_cut(data, weight_type, 64 * 8)
    other = alike(first, data.draw(layers(weight_type, st.just(first.config), N=64 * 8, K=first.K)))
    tensors = with_bias(first, "fused") | first.named("gate") | other.named("up")
    x = (torch.arange(2 * first.K) % 5 - 2).reshape(2, -1).float()

    def make(asked: Any) -> Any:
        return lambda weights: MergedColumnParallelLinear.load(weights, asked)

    for asked, names in (("fused", ["fused"]), (["gate", "up"], ["gate", "up"])):
        own = {name: held for name, held in tensors.items() if name.partition(".")[0] in names}
        whole = on_all_ranks(own, first.loader(), 1, make(asked), lambda rank: x)[0]
        gates, ups = whole.chunk(2, -1)

        for rank, got in enumerate(on_all_ranks(own, first.loader(), world, make(asked), lambda rank: x)):
            want = torch.cat([gates.chunk(world, -1)[rank], ups.chunk(world, -1)[rank]], -1)
            torch.testing.assert_close(got, want, rtol=0, atol=0)
