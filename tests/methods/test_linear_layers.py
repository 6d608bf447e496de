"""Tensor-parallel layers on the CPU, loaded from an AWQ checkpoint the way an engine loads them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, CutError, DivideError, ShapeError
from qload.formats import AWQWeight
from qload.methods import (
    AWQMarlinConfig,
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from qload.parallel import FakeWorld, Rank
from qload.testing import assert_reads_back, assert_sums_exactly, assert_within_bound
from tests.methods.engine import awq, config_of, joined, load, ranks, ready

pytestmark = pytest.mark.usefixtures("seen_texts")

worlds = pytest.mark.parametrize("world", [1, 2, 4], ids="{} ranks".format)
# Inputs, outputs and group size of one rank's share: whole thread blocks, and what has to be padded to them.
shares = pytest.mark.parametrize(
    ("K", "N", "group", "bits"),
    [
        pytest.param(128, 64, 32, 4, id="whole blocks"),
        pytest.param(160, 72, 32, 4, id="padded"),
        pytest.param(128, 8, 128, 4, id="one group a rank"),
        pytest.param(96, 24, -1, 4, id="one group in all"),
        pytest.param(64, 68, 64, 8, id="8 bits"),
    ],
)


def options(weight: AWQWeight, rank: Rank, **more: Any) -> dict[str, Any]:
    config = config_of(weight, **more)
    return {"params_dtype": torch.float16, "quant_config": config, "prefix": "a", "process_group": rank}


def check(kernel: Any, weight: AWQWeight) -> None:
    """By single inputs, exact sums and a bound; float32, so that adding up the ranks loses nothing."""
    assert_reads_back(kernel, weight, torch.float16)
    assert_sums_exactly(kernel, weight, torch.float32)
    x = torch.randn(3, weight.layer.K, generator=torch.Generator().manual_seed(1))
    assert_within_bound(kernel, weight, x)


@worlds
@shares
def test_column_outputs_are_the_layers_one_after_another(
    world: int, K: int, N: int, group: int, bits: int
) -> None:
    weight = awq(K, N * world, group, bits)

    def make(rank: Rank) -> nn.Module:
        module = ColumnParallelLinear(K, N * world, bias=False, **options(weight, rank))
        load(module, weight.fields())
        return ready(module)

    modules = ranks(world, make)
    assert [module.output_size_per_partition for module in modules] == [N] * world
    check(lambda x: torch.cat([module(x) for module in modules], -1), weight)


@worlds
@shares
def test_row_outputs_sum_to_the_layers(world: int, K: int, N: int, group: int, bits: int) -> None:
    weight = awq(K * world, N, group, bits)

    def make(rank: Rank) -> nn.Module:
        module = RowParallelLinear(K * world, N, bias=False, **options(weight, rank))
        load(module, weight.fields())
        return ready(module)

    modules = ranks(world, make)
    assert [module.input_size_per_partition for module in modules] == [K] * world
    check(lambda x: sum(m(part) for m, part in zip(modules, x.split(K, -1), strict=True)), weight)


@worlds
@pytest.mark.parametrize("at_once", [False, True], ids=["part by part", "from one tensor"])
def test_merged_outputs_are_each_parts_share(world: int, at_once: bool) -> None:
    widths, parts = (64 * world, 24 * world), [awq(128, n * world, 32, seed=n) for n in (64, 24)]
    whole = joined(parts)

    def make(rank: Rank) -> nn.Module:
        module = MergedColumnParallelLinear(128, widths, bias=False, **options(whole, rank))
        for part, weight in enumerate(parts):
            load(module, whole.fields()) if at_once else load(module, weight.fields(), part)
        return ready(module)

    modules = ranks(world, make)

    def kernel(x: Tensor) -> Tensor:
        shares = zip(*(module(x).split((64, 24), -1) for module in modules), strict=True)
        return torch.cat([output for part in shares for output in part], -1)

    check(kernel, whole)


QKV = [
    pytest.param(8, 8, 16, 16, id="as many keys as queries"),
    pytest.param(8, 4, 16, 16, id="fewer keys"),
    pytest.param(8, 2, 16, 16, id="keys for two ranks"),
    pytest.param(4, 1, 64, 64, id="one key for all ranks"),
    pytest.param(4, 2, 32, 8, id="narrow values"),
]


@worlds
@pytest.mark.parametrize(("heads", "kv", "size", "v_size"), QKV)
def test_every_rank_has_its_queries_and_the_keys_and_values_they_attend_to(
    world: int, heads: int, kv: int, size: int, v_size: int
) -> None:
    widths = {"q": heads * size, "k": kv * size, "v": kv * v_size}
    parts = {part: awq(64, n, 32, seed=n + ord(part)) for part, n in widths.items()}
    for rank in FakeWorld(world):
        made = options(parts["q"], rank)
        module = QKVParallelLinear(64, size, heads, kv, bias=False, v_head_size=v_size, **made)
        for part, weight in parts.items():
            load(module, weight.fields(), part)
        ready(module)
        own = {"q": heads // world, "k": max(kv // world, 1), "v": max(kv // world, 1)}
        first = {"q": rank.place * own["q"], "k": rank.place * kv // world, "v": rank.place * kv // world}
        for y, part in zip(
            module(torch.eye(64)).split(module.output_partition_sizes, -1), "qkv", strict=True
        ):
            wide = v_size if part == "v" else size
            start, stop = first[part] * wide, (first[part] + own[part]) * wide
            assert torch.equal(y.T, parts[part].dequantize()[start:stop])


@worlds
def test_a_fused_qkv_tensor_is_taken_apart(world: int) -> None:
    parts = [awq(64, n, 64, seed=n) for n in (128, 64, 32)]
    whole = joined(parts)

    def make(rank: Rank) -> nn.Module:
        module = QKVParallelLinear(64, 16, 8, 4, v_head_size=8, bias=False, **options(whole, rank))
        load(module, whole.fields())
        return ready(module)

    modules = ranks(world, make)

    def kernel(x: Tensor) -> Tensor:
        outputs = [module(x).split(module.output_partition_sizes, -1) for module in modules]
        return torch.cat([output for part in zip(*outputs, strict=True) for output in part], -1)

    check(kernel, whole)


@worlds
def test_a_bias_is_cut_with_the_outputs_and_added_once_with_the_inputs(world: int) -> None:
    weight, bias = awq(128, 32, 32), torch.arange(32.0).half()

    def make(kind: type[LinearBase], rank: Rank) -> nn.Module:
        module = kind(128, 32, **options(weight, rank))
        load(module, {**weight.fields(), "bias": bias})
        return ready(module)

    columns = ranks(world, lambda rank: make(ColumnParallelLinear, rank))
    rows = ranks(world, lambda rank: make(RowParallelLinear, rank))
    x, want = torch.zeros(2, 128), bias.float().expand(2, 32)

    assert torch.equal(torch.cat([module(x) for module in columns], -1), want)
    assert torch.equal(sum(module(x[:, : 128 // world]) for module in rows), want)


@worlds
def test_plain_layers_are_cut_alike(world: int) -> None:
    weight = torch.arange(64.0 * 32).reshape(32, 64) % 7
    parts, x = (
        {"q": weight[:16], "k": weight[16:24], "v": weight[24:]},
        torch.arange(128.0).reshape(2, 64) % 5,
    )
    outputs = []
    for rank in FakeWorld(world):
        row = RowParallelLinear(64, 32, bias=False, process_group=rank)
        load(row, {"weight": weight})
        outputs.append(ready(row)(x.split(64 // world, -1)[rank.place]))
        qkv = QKVParallelLinear(64, 4, 4, 2, bias=False, process_group=rank)
        for part, tensor in parts.items():
            load(qkv, {"weight": tensor}, part)
        assert torch.equal(
            ready(qkv)(x)[:, : 16 // world], (x @ parts["q"].T).split(16 // world, -1)[rank.place]
        )

    assert torch.equal(sum(outputs), x @ weight.T)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        pytest.param(
            lambda o: RowParallelLinear(192, 64, **o),
            CutError,
            r"a\.scales: cannot cut K = 192 at 96 for 2 ranks\n.*multiples of 64 .*\n.*\n.*world sizes 3$",
            id="inside a group",
        ),
        pytest.param(
            lambda o: ColumnParallelLinear(64, 24, **o), CutError, r"a\.qweight: .* N = 24 at 12", id="a word"
        ),
        pytest.param(
            lambda o: MergedColumnParallelLinear(64, [8, 24], **o),
            CutError,
            "multiples of 8",
            id="a part's word",
        ),
        pytest.param(lambda o: ColumnParallelLinear(64, 33, **o), DivideError, "N = 33 .* 2 ranks", id="N"),
        pytest.param(lambda o: RowParallelLinear(65, 64, **o), DivideError, "K = 65 .* 2 ranks", id="K"),
        pytest.param(lambda o: QKVParallelLinear(64, 8, 3, **o), DivideError, "query heads = 3", id="heads"),
        pytest.param(
            lambda o: QKVParallelLinear(64, 8, 6, 3, **o),
            DivideError,
            "key and value heads = 3",
            id="kv heads",
        ),
        pytest.param(
            lambda o: ColumnParallelLinear(96, 64, **o),
            ArgumentError,
            r"groups of 64 .*\n.*K = 96",
            id="ragged",
        ),
    ],
)
def test_a_share_that_cannot_be_is_refused_when_the_layer_is_made(
    make: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make(options(awq(64, 8, 64), Rank(0, 2), group_size=64))


@pytest.mark.parametrize(
    ("name", "tensor", "shard", "text"),
    [
        pytest.param("qweight", torch.zeros(64, 12).int(), (), r"a\.qweight: .*\n.* 10 along axis 1", id="N"),
        pytest.param("qweight", torch.zeros(32, 8).int(), (0,), r"a\.qweight: .*\n.*\(64, 4\)", id="K"),
        pytest.param("scales", torch.ones(2, 16).half(), (1,), r"a\.scales: .*\n.*\(1, 8\)", id="groups"),
        pytest.param("scales", torch.ones(1, 16).half(), ("q",), r"shard_id\n.*0, 1\n.*'q'", id="shard"),
    ],
)
def test_a_tensor_of_another_shape_is_refused_by_name(
    name: str, tensor: Tensor, shard: tuple[int | str, ...], text: str
) -> None:
    made = options(awq(64, 8, 64), Rank(1, 2))
    module = MergedColumnParallelLinear(64, [64, 16], bias=False, **made)

    with pytest.raises((ShapeError, ArgumentError), match=text):
        load(module, {name: tensor}, *shard)


@pytest.mark.parametrize("rows", [32, 64], ids=["cut already", "half of it"])
def test_a_row_share_is_cut_from_the_whole_tensor_only(rows: int) -> None:
    module = RowParallelLinear(128, 8, bias=False, **options(awq(128, 8, 32), Rank(1, 2)))

    with pytest.raises(ShapeError, match=r"a\.qweight: wrong shape\n  expected 128 along axis 0"):
        load(module, {"qweight": torch.zeros(rows, 1, dtype=torch.int32)})


@pytest.mark.parametrize("kind", [RowParallelLinear, LinearBase], ids=lambda kind: kind.__name__)
def test_a_layer_of_one_part_has_no_shards(kind: type[LinearBase]) -> None:
    module = kind(8, 8, prefix="a")

    with pytest.raises(ArgumentError, match=r"a\.weight: shard_id\n  expected None.*\n  got      0"):
        load(module, {"weight": torch.zeros(8, 8)}, 0)


def test_a_method_that_is_for_no_linear_layer_is_refused() -> None:
    class Strange(AWQMarlinConfig):
        def get_quant_method(self, layer: nn.Module, prefix: str = "") -> Any:
            return self

    with pytest.raises(ArgumentError, match="a LinearMethodBase"):
        LinearBase(8, 8, quant_config=Strange(4, 128, True))


def test_a_layer_says_its_share() -> None:
    module = ColumnParallelLinear(8, 16, bias=False, process_group=Rank(1, 2))

    assert module.extra_repr() == (
        "in_features=8, out_features=8, bias=False, rank 1 of 2, UnquantizedLinearMethod"
    )
