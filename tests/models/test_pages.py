"""Sequences grow page by page, never into each other's, and give back what they had."""

import pytest
import torch

from qload.errors import ArgumentError
from qload.models.kv_cache import PADDING_PAGE, PageTable, Step


def test_slots_follow_the_pages_that_a_sequence_was_given() -> None:
    table = PageTable(2, 8, page_size=4)
    first = table.grow(0, 3)
    other = table.grow(1, 1)
    then = table.grow(0, 2)

    assert first == ([0, 1, 2], [4, 5, 6])  # page 1
    assert other == ([0], [8])
    assert then == ([3, 4], [7, 12])  # page 3 comes after page 2, which is the other's
    assert table.table([0, 1]) == [[1, 3], [2, PADDING_PAGE]]
    assert table.table([1], 4) == [[2, PADDING_PAGE, PADDING_PAGE, PADDING_PAGE]]


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_all_sequences_can_have_all_their_tokens_at_once(page_size: int) -> None:
    table = PageTable(3, 10, page_size)
    slots = [slot for _ in range(10) for sequence in range(3) for slot in table.grow(sequence, 1)[1]]

    assert len({*slots}) == 30
    assert {slot // page_size for slot in slots} == {*range(1, table.pages)}
    assert [table.length(sequence) for sequence in range(3)] == [10, 10, 10]


def test_a_sequence_that_begins_again_has_its_old_pages_first() -> None:
    table = PageTable(2, 8, page_size=4)
    before = table.grow(0, 8)
    table.restart(0)

    assert table.length(0) == 0
    assert table.grow(0, 8) == before


def test_a_step_shows_its_tensors_alone_and_names_one_on_another_device() -> None:
    index = torch.zeros(1, dtype=torch.int64)

    assert repr(Step(index, index, index[None])).count("tensor(") == 3
    assert "cached" not in repr(Step(index, index, index[None]))
    with pytest.raises(ArgumentError) as caught:
        Step(index, index.to("meta"), index[None])
    assert str(caught.value) == "step: slots\n  expected a tensor on cpu\n  got      meta"
