"""Layers that load through `Weights`, on small layers of few formats; tests/models has all of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload.architecture import architecture_of
from qload.detect import loader_from_config
from qload.errors import ArgumentError, DivideError, DtypeError, MismatchError, ShapeError
from qload.loader import Heads
from qload.methods import (
    ColumnParallelLinear,
    JoinedLinear,
    LoadedLinearMethod,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from qload.parallel import FakeWorld, Rank
from qload.spec import Weight
from tests.kernels.mp_layers import Case
from tests.methods.loaded_layers import PLAIN, bias_of, cut_for_rows, on_all_ranks, refusals, weights_of

pytestmark = pytest.mark.usefixtures("seen_texts")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}


def gptq(name: str, **case: Any) -> dict[str, Tensor]:
    """The tensors of a layer whose sums are exact, act order as the case says."""
    weight = Case(**{"K": 128, "N": 64, **case}).weight(scale=0.25)
    return {f"{name}.{field}": tensor for field, tensor in weight.fields().items()}


def count(*shape: int) -> Tensor:
    """Small integers."""
    return (torch.arange(torch.Size(shape).numel()) % 11 - 5).reshape(shape).float()


def test_a_loaded_layer_is_of_its_class_and_moves_as_one() -> None:
    weights = weights_of({"up.weight": count(8, 4), "up.bias": bias_of(8)}, PLAIN, list(FakeWorld(2))[1])

    layer = ColumnParallelLinear.load(weights, "up")

    assert isinstance(layer, ColumnParallelLinear)
    assert isinstance(layer.quant_method, LoadedLinearMethod)
    assert (layer.input_size, layer.output_size, layer.output_size_per_partition) == (4, 8, 4)
    assert "in_features=4, out_features=4, bias=True, rank 1 of 2, LoadedLinearMethod" in repr(layer)
    assert layer.to("meta").typed_linear.weight.is_meta
    assert not list(layer.parameters())


def test_the_method_of_a_loaded_layer_makes_none() -> None:
    with pytest.raises(ArgumentError, match="not loaded yet"):
        LoadedLinearMethod().create_weights(nn.Module(), 1, [1], 1, 1, torch.float32)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_column_and_a_row_are_what_the_whole_layers_make(world: int) -> None:
    tensors = {"up.weight": count(64, 16), "up.bias": bias_of(64), "down.weight": count(16, 64)}
    tensors["down.bias"] = bias_of(16)
    x = count(3, 16)

    def make(weights: Any) -> nn.Module:
        return nn.Sequential(
            ColumnParallelLinear.load(weights, "up"), RowParallelLinear.load(weights, "down")
        )

    want = (x @ tensors["up.weight"].T + bias_of(64)) @ tensors["down.weight"].T + bias_of(16)
    for got in on_all_ranks(tensors, PLAIN, world, make, lambda rank: x):
        assert torch.equal(got, want)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("act_order", [False, True])
def test_trap_65_rank_0_alone_adds_the_bias_of_a_row(world: int, act_order: bool) -> None:
    """With groups out of order too, and where the sum is left to the caller."""
    tensors = gptq("down", act_order=act_order) | {"down.bias": bias_of(64)}
    loader, x = loader_from_config(GPTQ), count(2, 128)
    whole = weights_of(tensors, loader).get_weights("down").get_linear()(x)

    def summed(weights: Any) -> nn.Module:
        return RowParallelLinear.load(weights, "down")

    def summand(weights: Any) -> nn.Module:
        return RowParallelLinear.load(weights, "down", reduce_results=False)

    for got in on_all_ranks(tensors, loader, world, summed, cut_for_rows(x)):
        assert torch.equal(got, whole + bias_of(64))
    shares = on_all_ranks(tensors, loader, world, summand, cut_for_rows(torch.zeros_like(x)))
    assert torch.equal(shares[0], bias_of(64).expand(2, -1))
    assert not any(share.any() for share in shares[1:])


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_trap_66_fewer_heads_of_keys_than_ranks_are_on_several(world: int, fused: bool) -> None:
    """8 heads of queries of 4, 2 of keys, and of values of 6: head rank * 2 // ranks."""
    parts = {"q": count(32, 4), "k": count(8, 4) + 20, "v": count(12, 4) + 50}
    biases = {"q": bias_of(32), "k": bias_of(8) + 100, "v": bias_of(12) + 200}
    tensors = {f"{name}.weight": held for name, held in parts.items()}
    tensors |= {f"{name}.bias": held for name, held in biases.items()}
    if fused:
        tensors = {"qkv.weight": torch.cat([*parts.values()]), "qkv.bias": torch.cat([*biases.values()])}
    x = count(2, 4)

    def make(weights: Any) -> nn.Module:
        layer = QKVParallelLinear.load(
            weights, "qkv" if fused else ["q", "k", "v"], Heads(8, 2), head_size=4, v_head_size=6
        )
        assert (layer.num_heads, layer.num_kv_heads) == (8 // world, max(2 // world, 1))
        assert layer.num_kv_head_replicas == max(world // 2, 1)
        return layer

    whole = {name: (x @ held.T + biases[name]) for name, held in parts.items()}
    for rank, got in enumerate(on_all_ranks(tensors, PLAIN, world, make, lambda rank: x)):
        keys = [whole[name].split(size, -1) for name, size in (("k", 4), ("v", 6))]
        here = range(rank * 2 // world, rank * 2 // world + max(2 // world, 1))
        mine = [whole["q"].chunk(world, -1)[rank], *(each[head] for each in keys for head in here)]
        assert torch.equal(got, torch.cat(mine, -1))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "gptq"])
def test_trap_63_interleaved_heads_are_put_in_order_with_their_biases(world: int, quantized: bool) -> None:
    """Two groups of 2 queries, their key and their value, of 8 each: in any format, and of the bias alike."""
    tensors = gptq("qkv") if quantized else {"qkv.weight": count(64, 128)}
    tensors["qkv.bias"] = bias_of(64)
    loader = loader_from_config(GPTQ if quantized else None)
    x = count(2, 128)
    stored = weights_of(tensors, loader).get_weights("qkv").get_linear()(x) + bias_of(64)
    groups = [group.split([16, 8, 8], -1) for group in stored.chunk(2, -1)]

    def make(weights: Any) -> nn.Module:
        return QKVParallelLinear.load(weights, "qkv", Heads(4, 2), head_size=8, interleaved=True)

    for rank, got in enumerate(on_all_ranks(tensors, loader, world, make, lambda rank: x)):
        mine = groups if world == 1 else groups[rank : rank + 1]
        assert torch.equal(got, torch.cat([group[part] for part in range(3) for group in mine], -1))


def test_interleaved_groups_are_not_divided() -> None:
    tensors = {"qkv.weight": count(64, 4)}

    def make(weights: Any) -> nn.Module:
        return QKVParallelLinear.load(weights, "qkv", Heads(4, 2), head_size=8, interleaved=True)

    assert refusals(tensors, PLAIN, 4, make) == {"qkv: key/value heads = 2 does not divide into 4 ranks"}


@pytest.mark.parametrize(
    ("prefixes", "heads", "text"),
    [
        ("qkv", Heads(3, 2), "heads\n  expected as many queries for each key\n  got      3 and 2"),
        (
            "qkv",
            Heads(keys=2),
            "heads\n  expected the number of queries too\n  got      queries=None, keys=2",
        ),
        (
            ["q", "kv"],
            Heads(4, 2),
            "prefixes\n  expected one layer with interleaved heads\n  got      ['q', 'kv']",
        ),
    ],
)
def test_heads_that_cannot_be_interleaved_are_refused(prefixes: Any, heads: Heads, text: str) -> None:
    weights = weights_of({"qkv.weight": count(64, 4)}, PLAIN)

    with pytest.raises(ArgumentError) as refusal:
        QKVParallelLinear.load(weights, prefixes, heads, head_size=8, interleaved=True)
    assert str(refusal.value) == text


def test_parts_that_are_not_stored_alike_are_multiplied_one_by_one() -> None:
    """Mixed precision: queries and values in 4 bits, keys left plain, and a bias of queries alone."""
    tensors = gptq("q", seed=1) | {"k.weight": count(16, 128)} | gptq("v", seed=2) | {"q.bias": bias_of(64)}
    loader = loader_from_config(GPTQ | {"modules_in_block_to_quantize": [["q", "v"]]})
    names, x = ["q", "k", "v"], count(2, 128)
    alone = weights_of(tensors, loader)
    whole = [alone.get_weights(name).get_linear()(x) for name in names]
    whole[0] = whole[0] + bias_of(64)

    def make(weights: Any) -> nn.Module:
        layer = MergedColumnParallelLinear.load(weights, names)
        assert isinstance(layer.typed_linear, JoinedLinear)
        assert layer.output_sizes == (64, 16, 64)
        return layer

    for world in (1, 2):
        for rank, got in enumerate(on_all_ranks(tensors, loader, world, make, lambda rank: x)):
            assert torch.equal(got, torch.cat([part.chunk(world, -1)[rank] for part in whole], -1))


@pytest.mark.parametrize("world", [1, 2])
def test_parts_of_other_orders_of_groups_are_multiplied_one_by_one(world: int) -> None:
    """Each in an act order of its own, which no join of their indices says."""
    tensors = gptq("gate", act_order=True, seed=1) | gptq("up", act_order=True, seed=2)
    loader, x = loader_from_config(GPTQ), count(2, 128)
    alone = weights_of(tensors, loader)
    whole = [alone.get_weights(name).get_linear()(x) for name in ("gate", "up")]

    def make(weights: Any) -> nn.Module:
        return MergedColumnParallelLinear.load(weights, ["gate", "up"])

    for rank, got in enumerate(on_all_ranks(tensors, loader, world, make, lambda rank: x)):
        assert torch.equal(got, torch.cat([part.chunk(world, -1)[rank] for part in whole], -1))


def test_a_part_without_a_bias_has_one_of_zeros() -> None:
    tensors = {"gate.weight": count(8, 4), "up.weight": count(8, 4), "up.bias": bias_of(8)}
    x = count(2, 4)

    def make(weights: Any) -> nn.Module:
        layer = MergedColumnParallelLinear.load(weights, ["gate", "up"])
        assert not isinstance(layer.typed_linear, JoinedLinear)
        return layer

    y = x @ count(8, 4).T
    for rank, got in enumerate(on_all_ranks(tensors, PLAIN, 2, make, lambda rank: x)):
        own = slice(4 * rank, 4 * rank + 4)
        assert torch.equal(got, torch.cat([y[:, own], (y + bias_of(8))[:, own]], -1))


def test_layers_of_other_inputs_do_not_fuse() -> None:
    weights = weights_of({"gate.weight": count(8, 4), "up.weight": count(8, 6)}, PLAIN)

    with pytest.raises(MismatchError, match="differ in K"):
        MergedColumnParallelLinear.load(weights, ["gate", "up"])
    assert not weights.report().used


@pytest.mark.parametrize(
    ("bias", "error"), [(bias_of(9), ShapeError), (bias_of(8).int(), DtypeError)], ids=["shape", "dtype"]
)
def test_what_is_no_bias_is_refused_before_a_weight_is_read(bias: Tensor, error: type[Exception]) -> None:
    for rank in FakeWorld(2):
        weights = weights_of({"up.weight": count(8, 4), "up.bias": bias}, PLAIN, rank)
        for load in (ColumnParallelLinear.load, RowParallelLinear.load, ReplicatedLinear.load):
            options = {"reduce_results": False} if load == RowParallelLinear.load else {}
            with pytest.raises(error, match=r"up\.bias"):
                load(weights, "up", **options)  # type: ignore[operator]
        assert not weights.storage.reads  # type: ignore[attr-defined]


def test_ranks_that_cannot_tell_each_other_are_refused_before_a_weight_is_read() -> None:
    weights = weights_of({"up.weight": count(8, 4)}, PLAIN, Rank(0, 2))

    for load in (
        lambda: RowParallelLinear.load(weights, "up"),
        lambda: ColumnParallelLinear.load(weights, "up", gather_output=True),
    ):
        with pytest.raises(ArgumentError, match="summed, gathered, maximum and first"):
            load()
    assert not weights.report().used


def test_heads_of_one_layer_are_whole_and_not_gathered_where_they_repeat() -> None:
    tensors = {"k.weight": count(8, 4)}
    for rank in FakeWorld(4):
        layer = ColumnParallelLinear.load(weights_of(tensors, PLAIN, rank), "k", heads=Heads(keys=2))
        own = slice(rank.place // 2 * 4, rank.place // 2 * 4 + 4)
        assert torch.equal(layer(count(2, 4)), count(2, 4) @ count(8, 4)[own].T)
        with pytest.raises(ArgumentError, match="gather_output"):
            ColumnParallelLinear.load(
                weights_of(tensors, PLAIN, rank), "k", heads=Heads(keys=2), gather_output=True
            )


def test_shares_that_would_end_inside_of_a_head_are_refused_where_the_config_is_known() -> None:
    architecture = architecture_of(
        {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}
    )
    name = "model.layers.0.self_attn.k_proj"
    weights = weights_of({f"{name}.weight": count(8, 4)}, PLAIN, Rank(0, 4), architecture=architecture)

    with pytest.raises(DivideError, match="key/value heads = 2"):
        ColumnParallelLinear.load(weights, name)


def test_heads_that_a_layer_does_not_have_are_refused() -> None:
    weights = weights_of({"qkv.weight": count(16, 4), "q.weight": count(16, 4)}, PLAIN)

    for prefixes, heads, match in (
        ("qkv", Heads(2, 1), "2 \\+ 1 \\+ 1 heads of 8"),
        (["q", "q", "q"], Heads(2, 1), "1 heads of 8"),
    ):
        with pytest.raises(ShapeError, match=match):
            QKVParallelLinear.load(weights, prefixes, heads, head_size=8)
    for prefixes, heads in ((["q", "q"], Heads(2)), ("qkv", Heads(keys=2))):
        with pytest.raises(ArgumentError, match=r"prefixes|heads"):
            QKVParallelLinear.load(weights, prefixes, heads, head_size=8)
    with pytest.raises(DivideError, match="gate and up"):
        MergedColumnParallelLinear.load(weights_of({"gate_up.weight": count(7, 4)}, PLAIN), "gate_up")


def test_one_scale_of_all_inputs_is_that_of_all_ranks() -> None:
    """A token's largest input lies with one rank; every rank quantizes by it, as the whole layer does."""
    scheme = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    stored = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": stored, "input_activations": scheme}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    tensors = {"down.weight": (count(8, 16)).to(torch.int8), "down.weight_scale": torch.ones(8, 1)}
    loader = loader_from_config(config)
    x = count(3, 16)
    x[:, 5] = 127.5 * 4  # so that a token's scale is 4
    x[:, 6:] *= 4
    whole = weights_of(tensors, loader).get_weights("down").get_linear()(x)

    def make(weights: Any) -> nn.Module:
        return RowParallelLinear.load(weights, "down")

    for world in (1, 2, 4):
        for got in on_all_ranks(tensors, loader, world, make, cut_for_rows(x)):
            assert torch.equal(got, whole)


def test_a_layer_is_made_by_whoever_is_asked() -> None:
    seen: list[Any] = []

    def make(weight: Weight, bias: Tensor | None, maximum: Any) -> nn.Module:
        seen.append((weight.shape, bias, maximum))
        return weight.get_linear(bias, activations="unquantized")

    weights = weights_of({"up.weight": count(8, 4)}, PLAIN)

    layer = ReplicatedLinear.load(weights, "up", make=make)

    assert seen == [((8, 4), None, None)]
    assert torch.equal(layer(count(2, 4)), count(2, 4) @ count(8, 4).T)
