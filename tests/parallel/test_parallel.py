"""A rank's view of its world."""

import pytest
import torch.distributed

from qload.errors import ArgumentError
from qload.parallel import ALONE, FakeWorld, ProcessGroup, Rank


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
