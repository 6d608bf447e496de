"""Experts among ranks: cut, shared out, or both; shares are the whole, or all ranks refuse alike."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qload import ExpertsWeight, FakeWorld, LocalExperts
from qload.errors import ArgumentError, CutError, DivideError
from qload.spec import Role, Weight
from qload.testing import assert_same_bits
from tests.example_counts import at_most
from tests.experts.expert_layers import (
    FACTS,
    PREFIX,
    StoredExperts,
    assert_joined,
    every_matrix,
    experts,
    ranks,
    stored_plain,
)
from tests.format_cases import lawful

few = at_most(12)
WORLDS = st.sampled_from([2, 4, 8])


def meant(made: ExpertsWeight) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [made.dequantize(expert) for expert in range(made.shape[0])]


@every_matrix
@given(data=st.data(), world=WORLDS)
@few
def test_shares_of_experts_are_the_whole_or_every_rank_refuses_alike(
    weight_type: type[Weight], data: Any, world: int
) -> None:
    stored = data.draw(experts(weight_type, most=2))
    inner, hidden = stored.inner, stored.drawn[0][0].K

    if not (
        lawful(stored.config, "N", inner, world, hidden) and lawful(stored.config, "K", inner, world, inner)
    ):
        assert_refused_alike(stored, world, split="tensor")
        return

    parts = ranks(world, lambda group: stored.load(group, split="tensor"))
    assert {part.shape for part in parts} == {(stored.count, hidden, inner // world)}
    assert_joined(parts, stored.load())


def assert_refused_alike(stored: StoredExperts, world: int, **how: Any) -> str:
    """By every rank, in the same words, before any weight is read; the ledger has nothing."""
    facts = {
        suffix
        for layer in (stored.drawn[0][:1] if stored.drawn else ())
        for spec in layer.weight_type.tensors(layer.config)
        for suffix in spec.suffixes
        if spec.fact
    }
    texts = set()
    for group in FakeWorld(world):
        weights = stored.weights(group)
        with pytest.raises((CutError, DivideError)) as caught:
            weights.get_experts(PREFIX, facts=FACTS, **how)
        texts.add(str(caught.value))
        read = weights.storage.reads  # type: ignore[attr-defined]
        assert {name.split("proj.", 1)[1] for name in read} <= facts
        assert not weights.report().used
    (text,) = texts
    return text


@every_matrix
@given(data=st.data())
@settings(max_examples=4)
def test_an_expert_parallel_rank_has_its_experts_bit_for_bit(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(experts(weight_type, most=3))
    whole = stored.load()

    parts = ranks(stored.count, lambda group: stored.load(group, split="experts"))

    for place, part in enumerate(parts):
        assert (part.local.start, part.local.stop, part.local.total) == (place, place + 1, stored.count)
        for got, want in ((part.gate_up, whole.gate_up), (part.down, whole.down)):
            assert got.names == want.names[place : place + 1]
            for field, tensor in want.fields().items():
                assert_same_bits(got.fields()[field], tensor[place : place + 1])


@pytest.mark.parametrize(
    ("count", "world", "counts"),
    [(8, 2, [4, 4]), (5, 2, [3, 2]), (7, 4, [2, 2, 2, 1]), (9, 8, [2, 1, 1, 1, 1, 1, 1, 1]), (3, 1, [3])],
)
def test_the_first_ranks_have_one_more_where_experts_do_not_divide(
    count: int, world: int, counts: list[int]
) -> None:
    stored = stored_plain(count)
    whole = stored.load()

    parts = ranks(world, lambda group: stored.load(group, split="experts"))

    assert [len(part.local) for part in parts] == counts
    assert [name for part in parts for name in part.down.names] == list(whole.down.names)
    downs = [part.down.fields()["weight"] for part in parts]
    assert_same_bits(torch.cat(downs), whole.down.fields()["weight"])
    maps = torch.stack([part.local.map for part in parts])
    assert maps.shape == (world, count)
    assert (maps >= 0).sum(0).tolist() == [1] * count  # every expert is on one rank
    for rank, part in enumerate(parts):
        for expert, place in enumerate(maps[rank].tolist()):
            if place >= 0:
                assert part.down.names[place] == f"{PREFIX}.{expert}.down_proj"


def test_a_rank_without_experts_is_refused_by_all() -> None:
    text = assert_refused_alike(stored_plain(3), 4, split="experts")

    assert text.startswith(f"{PREFIX}: experts = 3 does not divide into 4 ranks")
    assert "lawful   world sizes 2, 3" in text


@pytest.mark.parametrize(("world", "runs"), [(4, 2), (8, 2), (8, 4), (8, 8), (8, 1), (2, 2)])
def test_a_grid_of_ranks_shares_experts_out_and_cuts_them(world: int, runs: int) -> None:
    stored = stored_plain(9, biased=True)
    whole = stored.load()

    parts = ranks(world, lambda group: stored.load(group, split="both", expert_ranks=runs))

    cutting = world // runs
    starts = []
    for run in range(runs):
        neighbours = parts[run * cutting : (run + 1) * cutting]
        assert len({(part.local.start, part.local.stop) for part in neighbours}) == 1
        assert_joined(neighbours, whole)
        assert [part.down_bias is None for part in neighbours] == [place > 0 for place in range(cutting)]
        starts += range(neighbours[0].local.start, neighbours[0].local.stop)
    assert starts == list(range(9))


def test_biases_of_gate_and_up_are_cut_as_their_outputs() -> None:
    stored = stored_plain(3, biased=True)
    whole = stored.load()

    parts = ranks(2, lambda group: stored.load(group, split="tensor"))

    halves = [part.gate_up_bias for part in parts if part.gate_up_bias is not None]
    gates, ups = zip(*(half.chunk(2, 1) for half in halves), strict=True)
    assert_same_bits(torch.cat([*gates, *ups], 1), whole.gate_up_bias)
    assert gates[1][2].tolist() == [float(208 + n) for n in range(8)]


def test_biases_of_down_are_on_one_of_the_ranks_that_are_summed() -> None:
    stored = stored_plain(3, biased=True)
    whole = stored.load()
    assert whole.down_bias is not None

    first, second = ranks(2, lambda group: stored.load(group, split="tensor"))
    shared = ranks(3, lambda group: stored.load(group, split="experts"))

    assert_same_bits(first.down_bias, whole.down_bias)
    assert second.down_bias is None
    assert_same_bits(torch.cat([p.down_bias for p in shared if p.down_bias is not None]), whole.down_bias)


@pytest.mark.parametrize(
    "how", [{"split": "tensor"}, {"split": "experts"}, {"split": "both", "expert_ranks": 2}], ids=str
)
def test_the_ledger_of_every_rank_is_clean(how: Any) -> None:
    stored = stored_plain(5, biased=True)
    for group in FakeWorld(4):
        weights = stored.weights(group)

        made = weights.get_experts(PREFIX, facts=FACTS, **how)

        report = weights.report()
        assert report.complete
        assert len(report.used) == 6 * len(made.local)
        assert len(report.exempted) == 6 * (5 - len(made.local))
        assert all("another rank" in reason for reason in report.exempted.values())


def test_a_tensor_beside_the_experts_of_other_ranks_is_still_unused() -> None:
    stored = stored_plain(2)
    stored.tensors[f"{PREFIX}.1.gate_proj.strange"] = torch.ones(3)
    weights = stored.weights(next(iter(FakeWorld(2))))

    weights.get_experts(PREFIX, facts=FACTS, split="experts")

    assert list(weights.report().unused) == [f"{PREFIX}.1.gate_proj.strange"]


@every_matrix
@given(data=st.data())
@settings(max_examples=4)
def test_a_rank_reads_its_own_experts_and_of_others_facts_and_scales(
    weight_type: type[Weight], data: Any
) -> None:
    stored = data.draw(experts(weight_type))
    specs = weight_type.tensors(stored.config)
    scales = {s for spec in specs if spec.role is Role.SCALE and not spec.fact for s in spec.suffixes}
    exponents = {s for spec in specs if spec.is_exponents for s in spec.suffixes}
    facts = {s for spec in weight_type.tensors(stored.config) if spec.fact for s in spec.suffixes}
    for place, group in enumerate(FakeWorld(stored.count)):
        weights = stored.weights(group)

        weights.get_experts(PREFIX, facts=FACTS, split="experts")

        own = sum(
            tensor.nbytes
            for name, tensor in stored.tensors.items()
            if name.startswith(f"{PREFIX}.{place}.") or name.split("proj.", 1)[1] in facts
        )
        examined = sum(  # on every rank, so that all refuse alike
            tensor.nbytes
            for name, tensor in stored.tensors.items()
            if stored.count > 1
            and (suffix := name.split("proj.", 1)[1]) in scales
            and (tensor.dtype.is_floating_point or suffix in exponents)
        )
        within = {spec.suffix: spec.scale_bytes for spec in specs if spec.scale_bytes}
        examined += sum(
            tensor.nbytes * (found.stop - found.start) // tensor.shape[-1]
            for name, tensor in stored.tensors.items()
            if stored.count > 1 and (found := within.get(name.split("proj.", 1)[1]))
        )
        assert weights.storage.bytes_read == own + examined  # type: ignore[attr-defined]


def test_a_cut_rank_reads_its_share_of_the_bytes() -> None:
    stored = stored_plain(4)
    total = sum(tensor.nbytes for tensor in stored.tensors.values())
    for group in FakeWorld(8):
        weights = stored.weights(group)
        weights.get_experts(PREFIX, facts=FACTS, split="both", expert_ranks=2)

        assert weights.storage.bytes_read == total // 8  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"split": "both"}, ArgumentError),
        ({"split": "both", "expert_ranks": 0}, ArgumentError),
        ({"split": "both", "expert_ranks": -2}, ArgumentError),
        ({"split": "both", "expert_ranks": 3}, DivideError),
        ({"split": "tensor", "expert_ranks": 2}, ArgumentError),
        ({"expert_ranks": 1}, ArgumentError),
        ({"split": "rows"}, ArgumentError),
    ],
)
def test_how_a_world_is_divided_has_to_be_said_once(how: Any, error: type[Exception]) -> None:
    for group in FakeWorld(4):
        with pytest.raises(error):
            stored_plain(4).load(group, **how)


@pytest.mark.parametrize("run", [(-1, 2, 4), (3, 2, 4), (0, 5, 4)])
def test_local_experts_lie_within_all_of_them(run: tuple[int, int, int]) -> None:
    with pytest.raises(ArgumentError, match="local"):
        LocalExperts(*run)
