"""A rank's view of its world."""

import gc
import weakref
from copy import deepcopy
from pathlib import Path

import pytest
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from qload.errors import ArgumentError, LostRankError
from qload.parallel import (
    ALONE,
    Collectives,
    FakeWorld,
    ProcessGroup,
    Rank,
    ReducingGroup,
    collectives_of,
    maximum_over,
)
from qload.parallel.process_group import torch_group

pytestmark = pytest.mark.usefixtures("seen_texts")


def test_a_fake_world_has_every_rank_once() -> None:
    assert [(group.rank(), group.size()) for group in FakeWorld(3)] == [(0, 3), (1, 3), (2, 3)]
    assert len(FakeWorld(3)) == 3


def test_anything_with_rank_and_size_is_a_process_group() -> None:
    assert isinstance(ALONE, ProcessGroup)
    assert issubclass(torch.distributed.ProcessGroup, ProcessGroup)
    assert not isinstance(object(), ProcessGroup)


@pytest.mark.parametrize(("place", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_of_its_world_is_refused(place: int, world: int) -> None:
    with pytest.raises(ArgumentError, match=f"expected 0 <= rank < size = {world}"):
        Rank(place, world)


def test_all_ranks_have_the_largest_values_of_all_as_often_as_they_ask() -> None:
    values = torch.tensor([[1.0, 9.0, -3.0], [4.0, 2.0, -1.0], [0.0, 5.0, -2.0]])

    def work(group: ReducingGroup) -> list[list[float]]:
        mine = values[group.rank()]
        return [maximum_over(group)(mine * times).tolist() for times in (1, -1, 2)]

    assert FakeWorld(3).run(work) == [[[4, 9, -1], [0, -2, 3], [8, 18, -2]]] * 3


def test_one_rank_has_nothing_to_reduce_and_others_need_a_reduction() -> None:
    values = torch.ones(2)

    assert maximum_over(ALONE)(values) is values
    with pytest.raises(ArgumentError, match=r"torch\.distributed, or one with maximum\(values\)"):
        maximum_over(Rank(0, 2))


def test_an_error_of_one_rank_is_raised_and_nobody_waits_for_it() -> None:
    def work(group: ReducingGroup) -> None:
        if group.rank() == 1:
            raise ArgumentError("x", "one", "another")
        group.maximum(torch.ones(1))

    with pytest.raises(ArgumentError, match="another"):
        FakeWorld(3).run(work)


def test_a_group_of_torch_distributed_reduces_as_it_is(tmp_path: Path) -> None:
    place = (tmp_path / "store").as_uri()
    torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        assert isinstance(group, ProcessGroup)
        assert not isinstance(group, ReducingGroup)
        values = torch.tensor([1.0, -2.0])
        assert maximum_over(group)(values).tolist() == [1, -2]
    finally:
        torch.distributed.destroy_process_group()


def test_what_asks_a_group_of_torch_does_not_keep_it() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        asked = collectives_of(torch.distributed.group.WORLD)
        assert torch_group(asked) is torch.distributed.group.WORLD
        assert deepcopy(asked) is asked
        values = torch.arange(6.0).view(2, 3)
        assert asked.summed(values).shape == asked.maximum(values.T.contiguous().T).shape == (2, 3)
        assert (asked.gathered(values).shape, asked.gathered(values.T, 0).shape) == ((2, 6), (6, 2))
        first = asked.first(values)
        assert torch.equal(first, values)
        assert first.data_ptr() != values.data_ptr()
    finally:
        torch.distributed.destroy_process_group()

    with pytest.raises(ArgumentError, match="a destroyed group"):
        asked.summed(torch.ones(2))
    assert torch_group(ALONE) is None


def test_a_failed_collective_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise RuntimeError("Connection closed by peer")

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        ranks = collectives_of(torch.distributed.group.WORLD)
        monkeypatch.setattr(torch.distributed, "all_reduce", fail)
        with pytest.raises(LostRankError) as caught:
            ranks.summed(torch.ones(2))
    finally:
        torch.distributed.destroy_process_group()

    text = "a rank of 2 is lost\n  reason   a collective failed: Connection closed by peer"
    assert (str(caught.value), caught.value.rank) == (text, None)


def test_a_group_of_torch_is_gone_once_it_is_destroyed() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    held = weakref.ref(torch.distributed.group.WORLD)
    asked = collectives_of(torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()
    gc.collect()

    assert held() is None
    assert asked.size() == 2


def test_ranks_tell_each_other_sums_shares_and_what_the_first_has() -> None:
    values = torch.tensor([[1.0, 9.0], [4.0, 2.0], [0.0, 5.0]])

    def work(group: Collectives) -> list[list[float]]:
        ranks, mine = collectives_of(group), values[group.rank()]
        assert deepcopy(ranks) is ranks
        told = [ranks.summed(mine), ranks.gathered(mine), ranks.gathered(mine[None], 0)[1], ranks.first(mine)]
        mine.zero_()  # what was told stays
        return [each.tolist() for each in told]

    assert FakeWorld(3).run(work) == [[[5, 16], [1, 9, 4, 2, 0, 5], [4, 2], [1, 9]]] * 3


def test_a_world_of_one_tells_itself() -> None:
    values, ranks = torch.ones(2), collectives_of(ALONE)

    for told in (ranks.summed(values), ranks.gathered(values, 0), ranks.maximum(values), ranks.first(values)):
        assert told is values
    with pytest.raises(ArgumentError, match="summed, gathered, maximum and first"):
        collectives_of(Rank(0, 2))


@pytest.mark.parametrize(
    "unlike", [torch.ones(3), torch.ones(2, dtype=torch.float64)], ids=["shape", "dtype"]
)
def test_ranks_that_bring_other_tensors_are_refused(unlike: torch.Tensor) -> None:
    with pytest.raises(ArgumentError) as caught:
        FakeWorld(2).run(lambda group: group.gathered(torch.ones(2) if group.rank() else unlike))

    kinds = sorted(("torch.float32 (2,)", f"{unlike.dtype} {tuple(unlike.shape)}"))
    assert str(caught.value) == (
        "values\n  expected tensors of one shape and dtype on all ranks\n  got      " + ", ".join(kinds)
    )
