"""Contract of every format for shares of a layer."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from qload.errors import CutError, DivideError, QloadError
from qload.loader import Heads
from qload.parallel import FakeWorld
from qload.spec import Weight
from qload.testing import assert_same_bits, layers
from qload.weights import Weights
from tests.example_counts import at_most
from tests.format_cases import CONFIGS, every_format, head_size, lawful, small_integers

WORLDS = st.sampled_from([2, 3, 4, 8])
LOADS = {"N": Weights.get_weights_col, "K": Weights.get_weights_row}


def shares(stored: Any, world: int, dim: str) -> list[Weight]:
    return [
        LOADS[dim](Weights(stored.storage(), loader=stored.loader(), process_group=rank), "layer")
        for rank in FakeWorld(world)
    ]


@every_format
@pytest.mark.parametrize("dim", ["N", "K"])
@given(data=st.data(), world=WORLDS)
@at_most(30)
def test_shares_are_the_whole_or_every_rank_refuses_alike(
    weight_type: type[Weight], dim: str, data: Any, world: int
) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type], most=8))

    if not lawful(stored.config, dim, getattr(stored, dim), world, stored.K):
        assert_refused_alike(stored, dim, world)
        return

    parts = shares(stored, world, dim)
    whole = stored.weight().dequantize()
    assert_same_bits(torch.cat([part.dequantize() for part in parts], dim=-2 if dim == "N" else -1), whole)
    assert {part.layer.whole for part in parts} == {tuple(whole.shape[-2:])}


def assert_refused_alike(stored: Any, dim: str, world: int) -> None:
    """Expect the same error on every rank, before any read of a weight."""
    texts = set()
    for rank in FakeWorld(world):
        storage = stored.storage()
        weights = Weights(storage, loader=stored.loader(), process_group=rank)
        with pytest.raises((CutError, DivideError)) as caught:
            LOADS[dim](weights, "layer")
        texts.add(str(caught.value))
        facts = {spec.suffix for spec in stored.weight_type.tensors(stored.config) if spec.fact}
        assert set(storage.reads) <= {f"layer.{fact}" for fact in facts}
        assert not weights.report().used
    assert len(texts) == 1


@every_format
@given(data=st.data(), world=st.sampled_from([2, 4]))
@at_most(12)
def test_row_shares_sum_to_the_whole_product(weight_type: type[Weight], data: Any, world: int) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type], K=384 * world, most=1, fillings=("count",)))
    if not lawful(stored.config, "K", stored.K, world, stored.K):
        assert_refused_alike(stored, "K", world)
        return
    x = small_integers((2, stored.K)).double()

    parts = shares(stored, world, "K")

    pieces = x.chunk(world, dim=1)
    total = sum(piece @ part.dequantize().double().mT for piece, part in zip(pieces, parts, strict=True))
    assert torch.equal(torch.as_tensor(total), x @ stored.weight().dequantize().double().mT)


@every_format
@given(data=st.data(), world=st.sampled_from([1, 2, 4]), how=st.sampled_from(["count", "sizes", "ratio"]))
@at_most(12)
def test_a_packed_layer_is_shared_block_by_block(
    weight_type: type[Weight], data: Any, world: int, how: str
) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type], N=head_size(weight_type) * 4 * world))
    assume(lawful(stored.config, "N", stored.N, 4 * world, stored.K))
    quarter = stored.N // 4
    sizes = [stored.N // 2] * 2 if how == "count" else [2 * quarter, quarter, quarter]
    blocks = {"count": 2, "sizes": tuple(sizes), "ratio": iter([2, 1, 1])}

    got = []
    for rank in FakeWorld(world):
        weights = Weights(stored.storage(), loader=stored.loader(), process_group=rank)
        choice = iter([2, 1, 1]) if how == "ratio" else blocks[how]
        got.append(weights.get_weights_col_packed("layer", choice))

    whole = stored.weight().dequantize().split(sizes, -2)
    for rank, share in enumerate(got):
        assert_same_bits(share.dequantize(), torch.cat([block.chunk(world, -2)[rank] for block in whole], -2))
        assert share.layer.parts == tuple(size // world for size in sizes)


@every_format
@given(data=st.data(), world=st.sampled_from([1, 2, 4, 8]))
@at_most(12)
def test_heads_are_shared_whole(weight_type: type[Weight], data: Any, world: int) -> None:
    size = head_size(weight_type)
    stored = data.draw(layers(weight_type, CONFIGS[weight_type], N=size * (8 + 2 + 2), most=1))
    assume(lawful(stored.config, "N", stored.N, 12, stored.K))
    heads = stored.weight().dequantize().split(size, -2)
    own = [(range(8), 8), (range(8, 10), 2), (range(10, 12), 2)]

    for rank in FakeWorld(world):
        weights = Weights(stored.storage(), loader=stored.loader(), process_group=rank)
        share = weights.get_weights_col_packed_qkv("layer", 8, 2)

        mine = [
            block[rank.rank() * count // world :][: max(1, count // world)] for block, count in own
        ]  # of two keys on four ranks: 0, 0, 1, 1
        assert_same_bits(share.dequantize(), torch.cat([heads[head] for block in mine for head in block], -2))
        assert share.layer.parts == tuple(size * len(block) for block in mine)


@every_format
@given(data=st.data(), world=st.sampled_from([1, 2, 4, 8]))
@at_most(12)
def test_heads_of_separate_layers_are_shared_as_those_of_a_fused_one(
    weight_type: type[Weight], data: Any, world: int
) -> None:
    size = head_size(weight_type)
    q = data.draw(layers(weight_type, CONFIGS[weight_type], N=size * 8, most=1))
    k, v = (data.draw(layers(weight_type, st.just(q.config), N=size * 2, K=q.K)) for _ in "kv")
    assume(lawful(q.config, "N", q.N, 8, q.K))
    for name in {spec.name for spec in weight_type.tensors(q.config) if spec.index_of} & set(q.tensors):
        k.tensors[name] = v.tensors[name] = q.tensors[name]
    tensors = {**q.named("q"), **k.named("k"), **v.named("v")}
    heads = {name: one.weight().dequantize().split(size, -2) for name, one in (("q", q), ("k", k), ("v", v))}

    for rank in FakeWorld(world):
        weights = Weights(type(q.storage())(tensors), loader=q.loader(), process_group=rank)
        share = weights.get_multi_weights_col(["q", "k", "v"], heads=Heads(8, 2))
        alone = weights.get_weights_col("k", heads=Heads(keys=2))

        mine = {
            name: each[rank.rank() * len(each) // world :][: max(1, len(each) // world)]
            for name, each in heads.items()
        }
        assert_same_bits(share.dequantize(), torch.cat([head for each in mine.values() for head in each], -2))
        assert share.layer.parts == tuple(size * len(each) for each in mine.values())
        assert_same_bits(alone.dequantize(), torch.cat(mine["k"], -2))


@every_format
@given(data=st.data(), world=st.sampled_from([1, 2, 4]))
@at_most(12)
def test_fused_layers_are_shared_part_by_part(weight_type: type[Weight], data: Any, world: int) -> None:
    first = data.draw(layers(weight_type, CONFIGS[weight_type], N=head_size(weight_type) * world))
    assume(lawful(first.config, "N", first.N, world, first.K))
    other = data.draw(layers(weight_type, st.just(first.config), N=128 * world, K=first.K))
    for name in {spec.name for spec in weight_type.tensors(first.config) if spec.index_of} & set(
        first.tensors
    ):
        other.tensors[name] = first.tensors[name]
    tensors = {**first.named("a"), **other.named("b")}

    for rank in FakeWorld(world):
        weights = Weights(type(first.storage())(tensors), loader=first.loader(), process_group=rank)
        fused = weights.get_multi_weights_col(["a", "b"], dim=0)

        parts = [s.weight().dequantize().chunk(world, -2)[rank.rank()] for s in (first, other)]
        assert_same_bits(fused.dequantize(), torch.cat(parts, -2))
        assert weights.report().complete


@every_format
@given(data=st.data())
@at_most(12)
def test_layers_of_different_inputs_do_not_fuse(weight_type: type[Weight], data: Any) -> None:
    first = data.draw(layers(weight_type, CONFIGS[weight_type], N=64, K=384))
    other = data.draw(layers(weight_type, st.just(first.config), N=64, K=768))
    weights = Weights(type(first.storage())({**first.named("a"), **other.named("b")}), loader=first.loader())

    with pytest.raises(QloadError, match="differ in K"):
        weights.get_multi_weights_col(["a", "b"])
